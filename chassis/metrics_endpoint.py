"""The HTTP server behind `/metrics`; `chassis.metrics.serve_metrics` starts it."""

import hmac
import logging
import os
import socket
import socketserver
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from chassis.hang_up import hang_up
from chassis.security import Security, SecurityError
from chassis.servers import BindError

TOKEN_VARIABLE = "HETERPS_METRICS_TOKEN_FILE"
PATH = "/metrics"
_TIMEOUT_S = 10.0  # for a client to shake hands, and to ask
_MOST, _SHARE = 32, 24  # connections at once, and those of one address
_log = logging.getLogger("heterps.metrics")


class Endpoint:
    """Serves one registry on a thread of its own until closed.

    Raises:
        SecurityError, BindError: as `serve_metrics`.
    """

    def __init__(
        self, bind: str, registry: CollectorRegistry, admits: Callable[[str], bool]
    ) -> None:
        host, _, port = bind.rpartition(":")
        security = Security.from_environment()
        security.require_for(host)
        context = _tls(security)
        token = (_own_token() or security.token) if context is not None else None
        try:
            self._server = _Server(host.strip("[]"), int(port), registry, context, token, admits)
        except (OSError, ValueError, OverflowError) as error:
            raise BindError(
                f"--metrics {bind}: cannot listen there: {error}; expected a free host:port of "
                "this machine (port 0 picks one)"
            ) from None
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.2,), name="metrics", daemon=True
        )
        self._thread.start()
        scheme = "http" if context is None else "https"
        _log.info("metrics at %s://%s%s", scheme, self.address, PATH)

    def close(self) -> None:
        """Stop listening; safe to repeat."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        context: ssl.SSLContext | None,
        token: str | None,
        admits: Callable[[str], bool],
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry = registry
        self.expected = f"Bearer {token}".encode() if token is not None else None
        self.admits = admits
        self._context = context
        self._lock = threading.Lock()
        self._open = Counter[str]()  # connections by address
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking DNS for a name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept; the handshake follows on the connection's own thread, so nobody waits for it."""
        connection, address = super().get_request()
        connection.settimeout(_TIMEOUT_S)
        if self._context is not None:
            connection = self._context.wrap_socket(
                connection, server_side=True, do_handshake_on_connect=False
            )
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, unless there are enough."""
        address = client_address[0]
        with self._lock:
            full = self._open.total() >= _MOST or self._open[address] >= _SHARE
            self._open[address] += not full
        if full:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be had
            self._forget(address)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and be done in time however slowly the client asks."""
        late = threading.Timer(_TIMEOUT_S, hang_up, (request,))
        late.daemon = True
        late.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            self._forget(client_address[0])

    def _forget(self, address: str) -> None:
        with self._lock:
            self._open -= Counter((address,))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that broke off or speaks no TLS is not worth a traceback."""
        _log.debug("a scrape from %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        expected = self.server.expected
        given = self.headers.get("Authorization", "")
        if not (
            expected is None
            or hmac.compare_digest(given.encode(errors="replace"), expected)
            or self.server.admits(given.removeprefix("Bearer "))
        ):
            self._answer(HTTPStatus.UNAUTHORIZED, b"the token is missing or wrong\n")
            return
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"expected {PATH}\n".encode())
            return
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        try:
            text = encode(self.server.registry)
        except Exception:
            _log.exception("reading the metrics failed")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"see the log of this process\n")
            return
        self._answer(HTTPStatus.OK, text, kind)

    def version_string(self) -> str:
        return "heterps"

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes come every few seconds: nothing to say."""

    def _answer(
        self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8"
    ) -> None:
        self.send_response(status)
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _tls(security: Security) -> ssl.SSLContext | None:
    if security.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    paths = os.environ["HETERPS_TLS_CERT"], os.environ["HETERPS_TLS_KEY"]  # ssl reads only files
    try:
        context.load_cert_chain(*paths)
    except (OSError, ssl.SSLError) as error:
        raise SecurityError(
            f"HETERPS_TLS_CERT={paths[0]}, HETERPS_TLS_KEY={paths[1]}: {error}; expected a "
            "certificate and its key in PEM files"
        ) from None
    return context


def _own_token() -> str | None:
    path = os.environ.get(TOKEN_VARIABLE)
    if not path:
        return None
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecurityError(f"{TOKEN_VARIABLE}={path}: {error}; expected a readable file") from None
    if len(token) < 16:
        raise SecurityError(f"{TOKEN_VARIABLE}: the token is shorter than 16 characters")
    return token
