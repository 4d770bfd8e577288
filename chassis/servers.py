"""Serving: one gRPC server shape for every role, with health, reflection and bind rules."""

import resource
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from chassis import tracing
from chassis.callers import Callers, Lookup
from chassis.channels import CONNECTION_OPTIONS
from chassis.crowds import watch
from chassis.parsing import Parsing
from chassis.security import Security, is_loopback

RawHandler = Callable[[bytes, grpc.ServicerContext], bytes]
# Of one message. Larger ones are refused by the length before them.
CONTROL_BYTES = 64 << 20
TENSOR_BYTES = 1 << 30
_STREAMS = 128  # calls of one connection at once; a client keeps others back
_STREAM_BYTES = 1 << 20  # of a call that no thread has begun to read
_CONNECTIONS = 4096
_SHARE = 0.75  # of them, of one address; enough for a host full of workers
_LOOK_S = 0.5
_FILES = 1 << 16
_SERVER_OPTIONS = [
    *CONNECTION_OPTIONS,
    ("grpc.http2.lookahead_bytes", _STREAM_BYTES),
    ("grpc.http2.bdp_probe", 0),  # it would make that more
    ("grpc.max_concurrent_streams", _STREAMS),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a silent second listener
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # who sends more is cut off
]


class BindError(RuntimeError):
    """The address cannot be listened on."""


class Server:
    """A gRPC server on one address.

    Args:
        name: the role, for errors.
        bind: host:port, port 0 for any free one.
        threads: how many calls run at once.
        lookup: who is known by a token, besides those who are to every server.
        most_bytes: of a message that it takes.

    Attributes:
        callers: tells who makes a call.
    """

    def __init__(
        self,
        name: str,
        bind: str = "127.0.0.1:0",
        *,
        security: Security | None = None,
        threads: int = 16,
        lookup: Lookup = lambda token: None,
        most_bytes: int = CONTROL_BYTES,
    ) -> None:
        self._name = name
        self._bind = bind
        self._security = security or Security.from_environment()
        host = bind.rpartition(":")[0]
        self._security.require_for(host)
        self.callers = Callers(self._security.asked_token, lookup)
        self._health = health.HealthServicer()
        guard = self.callers.interceptor(self._whole_health)
        self._server = grpc.server(
            ThreadPoolExecutor(threads, thread_name_prefix=name),
            interceptors=[*([guard] if guard else []), *tracing.interceptors(name), Parsing()],
            options=[
                *_SERVER_OPTIONS,
                ("grpc.max_receive_message_length", most_bytes),
                ("grpc.max_allowed_incoming_connections", _most_connections()),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services = [reflection.SERVICE_NAME, health.SERVICE_NAME]
        self._stopped = threading.Event()
        self.address = ""

    def add(
        self,
        register: Callable[[Any, grpc.Server], None],
        servicer: object,
        service: str,
        raw: Mapping[str, RawHandler] | None = None,
    ) -> None:
        """Register a servicer.

        Args:
            register: the generated `add_XServicer_to_server`.
            service: its full name, such as heterps.v1.Stage.
            raw: methods that take and return the message's bytes, bypassing protobuf.
        """
        register(servicer, self._server)
        if raw:  # registered last: the later handler of a method replaces the earlier
            handlers: dict[str, Any] = {
                method: grpc.unary_unary_rpc_method_handler(handler)
                for method, handler in raw.items()
            }
            self._server.add_registered_method_handlers(service, handlers)
        self._services.append(service)

    def start(self) -> str:
        """Listen and serve; the address with its real port.

        Raises:
            BindError: the port is taken or the host is not ours.
        """
        host = self._bind.rpartition(":")[0]
        reflection.enable_server_reflection(self._services, self._server)
        credentials = self._security.server_credentials()
        try:
            if credentials is None:
                port = self._server.add_insecure_port(self._bind)  # loopback: checked above
            else:
                port = self._server.add_secure_port(self._bind, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise BindError(
                f"{self._name}: cannot listen on {self._bind}: the port is in use or the host is "
                "not this machine's; expected a free host:port (port 0 picks one)"
            )
        self._server.start()
        if not is_loopback(host):  # else all come from this machine
            watch(port, int(_SHARE * _most_connections()), _LOOK_S, self._stopped)
        self.set_health(serving=True)
        self.address = f"{host}:{port}"
        return self.address

    def set_health(self, *, serving: bool) -> None:
        """What the health service answers: whether the process does its work."""
        status = health_pb2.HealthCheckResponse
        for service in ("", *self._services):
            self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    def _whole_health(self, context: grpc.ServicerContext) -> bytes:
        reply = self._health.Check(health_pb2.HealthCheckRequest(), context)
        return reply.SerializeToString()

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, let the running ones end within `grace_s`."""
        self._stopped.set()
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait(grace_s + 1.0)


def _most_connections() -> int:
    """Half of the files that this process may have open, so that a crowd leaves some for others."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FILES:
        files = _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return min(_CONNECTIONS, files // 2)
