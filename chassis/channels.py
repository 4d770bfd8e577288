"""Calling a server: channel options, deadlines and the one retry policy."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from chassis import tracing
from chassis.refusal import reason_of
from chassis.security import Security
from chassis.tls import handshake_problem
from protos.reason_pb2 import REASON_UNSPECIFIED, Reason

R = TypeVar("R")

# Of a connection, at both ends.
CONNECTION_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
# Measured on loopback: large frames and look-ahead keep 1-16 MiB messages near the ceiling.
OPTIONS: list[tuple[str, Any]] = [
    *CONNECTION_OPTIONS,
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.lookahead_bytes", 16 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]
RETRIED = (grpc.StatusCode.UNAVAILABLE,)
_RANDOM = random.Random()  # a job's code may draw from Python's own


class RpcError(RuntimeError):
    """A call that failed for good: who was called, for what, and what came back."""

    def __init__(
        self,
        what: str,
        code: grpc.StatusCode,
        details: str,
        reason: Reason.ValueType = REASON_UNSPECIFIED,
    ) -> None:
        super().__init__(f"{what}: {details} ({code.name})")
        self.code = code
        self.details = details
        self.reason = reason


def connect(address: str, security: Security | None = None) -> grpc.Channel:
    """A channel to `host:port`. Create it after forking, never before."""
    channel = (security or Security.from_environment()).channel(address, OPTIONS)
    return tracing.channel(channel, address)


def showing(token: str) -> Security:
    """What the environment names, with another token where one is given."""
    security = Security.from_environment()
    return replace(security, token=token) if token else security


def connect_async(address: str, security: Security | None = None) -> grpc.aio.Channel:
    """A channel for coroutines; untraced. Create it where the event loop runs."""
    return (security or Security.from_environment()).channel_async(address, OPTIONS)


def call(
    method: Callable[..., R],
    request: object,
    *,
    what: str,
    timeout_s: float,
    retry_s: float = 0.0,
    stop: Callable[[], bool] | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> R:
    """Call with a deadline; while unreachable, try again for up to `retry_s` seconds.

    Only calls that are safe to repeat may be given a `retry_s`.

    Args:
        what: names the callee and the purpose in errors.
        stop: asked between attempts; True ends the retries.
        pause: waits between two attempts, given seconds.

    Raises:
        RpcError: the call failed and was not, or no longer, retried.
    """
    attempts = Attempts(what, retry_s, stop)
    while True:
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            wait = attempts.after(error)
        pause(wait)


async def call_async(
    method: Callable[..., Awaitable[R]],
    request: object,
    *,
    what: str,
    timeout_s: float,
    retry_s: float = 0.0,
) -> R:
    """The same as `call`, on a channel of `connect_async`."""
    attempts = Attempts(what, retry_s)
    while True:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            wait = attempts.after(error)
        await asyncio.sleep(wait)


class Attempts:
    """The one retry policy: while nobody is reached, again after growing pauses.

    Args:
        what: names the callee and the purpose in errors.
        retry_s: seconds after which a failure is final.
        stop: True makes the next failure final.
    """

    def __init__(self, what: str, retry_s: float, stop: Callable[[], bool] | None = None) -> None:
        self._what = what
        self._give_up = time.monotonic() + retry_s
        self._stop = stop
        self._pause = 0.05

    def after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            RpcError: there is to be none.
        """
        code, details = status_of(error)
        wait = self._pause * _RANDOM.uniform(0.5, 1.5)
        again = code in RETRIED and time.monotonic() + wait < self._give_up
        if not again or (self._stop is not None and self._stop()):
            raise RpcError(self._what, code, details, reason_of(error)) from None
        self._pause = min(2 * self._pause, 2.0)
        return wait


def status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Code and details of a failed call, shortened to what a person needs."""
    call: Any = error  # gRPC's errors of a call are RpcError and Call at once
    if not hasattr(call, "code"):
        return grpc.StatusCode.UNKNOWN, str(error)
    code: grpc.StatusCode = call.code()
    details: str = call.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and not reason_of(error):
        away = "no server answers there" if "connect" in details.lower() else details
        details = handshake_problem(details) or away
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        details = "no answer within the deadline"
    return code, details
