"""The console beside a cluster on this machine."""

import logging
import socket
from importlib.util import find_spec
from pathlib import Path

from heterps.home import Role
from protos.process import Child, ChildError, module_argv, spawn

HOST, PORT = "127.0.0.1", 8700
_READY_S = 30.0
_NEEDS = ("fastapi", "jinja2", "uvicorn")
_log = logging.getLogger("heterps.console")


def start(scheduler: str, logs: Path) -> Child | None:
    """Start a console; None where its extra is not installed or it does not come up.

    Args:
        scheduler: its address.
        logs: folder of its log.
    """
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        _log.info("no console: %s not installed; see heterps[console]", ", ".join(missing))
        return None
    argv = module_argv("heterps", "console", "--scheduler", scheduler)
    try:
        return spawn("console", [*argv, "--bind", _free()], directory=logs).wait_ready(_READY_S)
    except ChildError as error:
        _log.warning("no console: %s", error)
        return None


def role(console: Child) -> Role:
    """How `heterps status` lists it."""
    return Role(console.label, console.pid, str(console.facts["url"]), str(console.log))


def _free() -> str:
    """The port that people remember, any other where that is taken."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, PORT))
        except OSError:
            return f"{HOST}:0"
    return f"{HOST}:{PORT}"
