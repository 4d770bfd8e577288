"""The console's process.

Usage: heterps console [--bind HOST:PORT] [--scheduler HOST:PORT]
"""

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

from chassis.process import announce, install_signals, setup_logging
from chassis.security import CERTIFICATE, KEY, Security, is_loopback
from heterps.errors import HeterpsError
from heterps.home.target import Target

_START_S = 20.0
_GRACE_S = 2
_MOST_CONNECTIONS = 200
_log = logging.getLogger("heterps.console")


def serve(target: Target, bind: str, ready_file: str | None = None) -> None:
    """Serve until told to end.

    Raises:
        HeterpsError: the address cannot be listened on, or the extra is not installed.
        SecurityError: others could reach it, and TLS and a token are not configured.
    """
    try:
        import uvicorn

        from heterps.console.app import make_app
        from heterps.console.site import Console
    except ModuleNotFoundError as error:
        raise HeterpsError(
            f"the console needs {error.name}; install it with `pip install 'heterps[console]'`"
        ) from None
    from heterps.console.guard import Sessions
    from heterps.console.traffic import Traffic
    from heterps.console.visitor import Visitors

    setup_logging("console")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    host = bind.rpartition(":")[0]
    with target.exported(), contextlib.ExitStack() as stack:
        security = Security.from_environment()
        security.require_for(host)
        loopback = is_loopback(host)
        listening = stack.enter_context(_listen(bind))
        visitors = Visitors(Target(target.address), security.token)
        stack.callback(visitors.own.client.close)
        traffic = Traffic(visitors.own.client)
        sessions = Sessions(visitors, security.token is not None)
        console = Console(target, sessions, traffic, secure=not loopback)
        config = uvicorn.Config(
            make_app(console, loopback),
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            ws="none",
            http="h11",
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=_GRACE_S,
        )
        if not loopback:  # nobody can listen in on loopback, and browsers know no CA of ours
            config.load()
            config.ssl = _tls()
        server = uvicorn.Server(config)
        stop = threading.Event()
        install_signals(stop)
        serving = threading.Thread(
            target=server.run, args=([listening],), name="console", daemon=True
        )
        asking = threading.Thread(target=traffic.loop, args=(stop,), name="traffic", daemon=True)
        serving.start()
        _await(lambda: server.started or not serving.is_alive())
        if not server.started:
            raise HeterpsError("the console did not start; see what it logged")
        asking.start()
        port = listening.getsockname()[1]
        url = f"{'http' if loopback else 'https'}://{host}:{port}/"
        _log.info("at %s", url)
        announce(ready_file, address=f"{host}:{port}", url=url)
        while serving.is_alive() and not stop.wait(0.5):
            pass
        stop.set()
        server.should_exit = True
        serving.join(_GRACE_S + 3.0)
        asking.join(3.0)


@contextlib.contextmanager
def _listen(bind: str) -> Iterator[socket.socket]:
    host, _, port = bind.rpartition(":")
    name = host.strip("[]")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((name, int(port)))
        except (OSError, ValueError, OverflowError):
            raise HeterpsError(
                f"console: cannot listen on {bind}: the port is in use or the host is not this "
                "machine's; expected a free host:port (port 0 picks one)"
            ) from None
        yield listening


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(os.environ[CERTIFICATE], os.environ[KEY])
    return context


def _await(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + _START_S
    while not ready() and time.monotonic() < until:
        time.sleep(0.02)
