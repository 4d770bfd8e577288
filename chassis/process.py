"""Manners of a process: starting children, announcing readiness, ending with the parent."""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from chassis.bounded_log import BoundedLog
from chassis.files import read_regular, replace_file
from chassis.logs import JsonFormatter, log_format, readable
from chassis.rooms import python_path

LIFELINE = "HETERPS_LIFELINE"
USERS_UMASK = 0o022  # of processes that run as another user than their parent
_DRAIN_S = 1.0
_ANNOUNCED_BYTES = 1 << 20
_log = logging.getLogger("heterps.process")


class ChildError(RuntimeError):
    """A child process that ended or kept silent before it was ready.

    Attributes:
        exit_code: how it ended; None when it kept silent.
    """

    def __init__(self, text: str, exit_code: int | None = None) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def setup_logging(role: str) -> None:
    """One line an event on standard error: time, level, role, message.

    HETERPS_LOG_FORMAT=json makes each a JSON object with more; `text` and `auto` are the same.
    """
    form = log_format()
    logging.basicConfig(
        level=os.environ.get("HETERPS_LOG", "INFO").upper(),
        format=f"%(asctime)s %(levelname).1s {role}: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    if form == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter(role))


def install_signals(
    stop: threading.Event, term: Callable[[], None] | None = None, grace_s: float = 5.0
) -> None:
    """Turn SIGTERM and SIGINT into `stop`, and end with the parent where it holds a lifeline.

    A thread of its own sets `stop`: a handler would run in the main thread, which may hold the
    event's lock just then, or be about to wait without having seen the signal.

    Args:
        term: called at a SIGTERM, on that thread, in place of setting `stop`.
        grace_s: seconds to stop in once the parent is gone.
    """
    end = term or stop.set
    reading, writing = socket.socketpair()
    writing.setblocking(False)

    def watch() -> None:
        while number := reading.recv(1):
            if number[0] == signal.SIGTERM:
                end()
            elif number[0] == signal.SIGINT:
                stop.set()

    def nothing(number: int, frame: FrameType | None) -> None:
        assert writing  # it lives as long as the handler does

    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    # A forked child's signals are not ours.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    signal.signal(signal.SIGTERM, nothing)
    signal.signal(signal.SIGINT, nothing)
    threading.Thread(target=watch, name="signals", daemon=True).start()
    lifeline(stop, grace_s)


def lifeline(stop: threading.Event | None = None, grace_s: float = 5.0) -> None:
    """End when the parent does: its end of our standard input closes, however it died.

    Unlike PR_SET_PDEATHSIG this does not depend on which thread of the parent started us.
    """
    if os.environ.pop(LIFELINE, None) != "1":
        return

    def watch() -> None:
        while os.read(0, 4096):
            pass
        if stop is not None:
            stop.set()
            time.sleep(grace_s)
        os._exit(3)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def announce(path: str | Path | None, **facts: Any) -> None:
    """Tell the parent that we are ready: write `facts` as JSON, in one atomic step."""
    if path is None:
        return
    told = json.dumps({"pid": os.getpid(), **facts})
    replace_file(Path(path), told, private=True)  # it may hold a password


def module_argv(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this project, whatever the working directory holds."""
    return [sys.executable, "-P", "-m", module, *arguments]


class Started(Protocol):
    """A process of ours, as `subprocess.Popen` has it."""

    pid: int
    stdin: IO[bytes] | None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        ...

    def terminate(self) -> None:
        """Ask it to end."""
        ...

    def kill(self) -> None:
        """Make it end."""
        ...


@dataclass(slots=True)
class Child:
    """A process started by `spawn`, or forked."""

    label: str
    process: Started
    log: Path
    ready_file: Path
    facts: dict[str, Any] = field(default_factory=dict)
    pump: threading.Thread | None = None  # brings what it prints into its log

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def address(self) -> str:
        """Where it listens, once ready."""
        return str(self.facts["address"])

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, None while it runs; by then its log is whole."""
        code = self.process.poll()
        if code is not None and self.pump is not None:
            self.pump.join(_DRAIN_S)  # a process that it started may hold the pipe open
            self.pump = None
        return code

    def wait_ready(self, timeout_s: float, stop: Callable[[], bool] | None = None) -> "Child":
        """Wait for its announcement.

        Raises:
            ChildError: it ended first, or did not announce in time; quotes its log.
        """
        deadline = time.monotonic() + timeout_s
        while not self.ready_file.exists():
            code = self.poll()
            if code is not None:
                raise ChildError(
                    f"{self.label} ended {describe_exit(code)} before it was ready\n"
                    f"{last_lines(self.log)}",
                    code,
                )
            if time.monotonic() > deadline or (stop is not None and stop()):
                self.stop(0.5)
                raise ChildError(
                    f"{self.label} was not ready within {timeout_s:.0f} s\n{last_lines(self.log)}"
                )
            time.sleep(0.02)
        try:
            facts = json.loads(read_regular(self.ready_file, _ANNOUNCED_BYTES))
        except (OSError, ValueError) as error:
            self.stop(0.5)
            raise ChildError(f"{self.label} announced itself wrongly: {error}") from None
        self.facts = facts
        return self

    def stop(self, grace_s: float = 3.0) -> None:
        """Ask it to end, then make it; safe to repeat."""
        stop_all([self], grace_s)


def stop_all(children: Sequence[Child], grace_s: float = 3.0) -> None:
    """End children together: SIGTERM to all, `grace_s` for all, SIGKILL to the rest."""
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        if child.process.stdin is not None:
            child.process.stdin.close()


def spawn(
    label: str,
    argv: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str] | None = None,
    log: BoundedLog | None = None,
    user: int | None = None,
) -> Child:
    """Start a process that ends with us and announces itself.

    `--ready-file PATH` is appended to `argv`; its output goes to DIRECTORY/LABEL.log.
    It gets its own process group, so that Ctrl-C in a terminal reaches the parent alone,
    which then ends its children in order.

    Args:
        log: where its output goes instead, so that it is bounded.
        user: number of the user and group to run as; root alone may say so.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ready = ready_path(directory, label)
    ready.unlink(missing_ok=True)
    path = log.path if log is not None else log_path(directory, label)
    with path.open("ab") as output:
        process = subprocess.Popen(
            [*argv, "--ready-file", str(ready)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if log is not None else output,
            stderr=subprocess.STDOUT,
            env={**inherited(), **(environment or {}), LIFELINE: "1"},
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=[] if user is not None else None,
            umask=USERS_UMASK if user is not None else -1,
        )
    child = Child(label, process, path, ready)
    if log is not None and process.stdout is not None:
        child.pump = log.pump(process.stdout)
    return child


def inherited() -> dict[str, str]:
    """Our environment, for a process of this project: PYTHONPATH hides none of its packages."""
    path = python_path(os.environ.get("PYTHONPATH"))
    return {**os.environ, **({"PYTHONPATH": path} if path else {})}


def ready_path(directory: Path, label: str) -> Path:
    """Where a child announces itself."""
    return directory / f"{_stem(label)}.ready.json"


def log_path(directory: Path, label: str) -> Path:
    """Where the output of a child goes."""
    return directory / f"{_stem(label)}.log"


def _stem(label: str) -> str:
    return label.replace(" ", "-").replace("/", "-")


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"by signal {-code} ({signal.Signals(-code).name})"
    return f"with exit code {code}"


def last_lines(log: Path, lines: int = 15, limit: int = 8192) -> str:
    """The end of a log file, for people whatever its format."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - limit))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    shown = [part for line in text.splitlines() for part in readable(line).splitlines()]
    return "\n".join(shown[-lines:])
