"""Calls to nodes and stage workers that a cancelled job does not have to wait for."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from chassis.channels import RETRIED, RpcError, connect, showing, status_of
from chassis.refusal import reason_of
from protos.node_pb2_grpc import NodeStub
from protos.reason_pb2 import REASON_UNSPECIFIED, Reason

R = TypeVar("R")
Stop = Callable[[], bool]
# What a callee refuses with a message written for the user; it needs no frame around it.
_PLAIN = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
_POLL_S = 0.1


class Interrupted(Exception):  # noqa: N818 - a request, not an error
    """The job is to end; whoever waited for something gives up."""


class CallError(RuntimeError):
    """A call that failed, worded for the user.

    Attributes:
        refused: the callee answered, with these words; otherwise it was not reached.
        reason: why it refused, where it told.
    """

    def __init__(
        self,
        text: str,
        *,
        refused: bool = False,
        reason: Reason.ValueType = REASON_UNSPECIFIED,
    ) -> None:
        super().__init__(text)
        self.refused = refused
        self.reason = reason


class Channels:
    """One channel to each address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def node(self, address: str) -> NodeStub:
        """The node daemon at `address`."""
        return NodeStub(self.to(address))

    def to(self, address: str, token: str = "") -> grpc.Channel:
        """The channel to `address`.

        Args:
            token: what to show there; empty for the cluster's.
        """
        with self._lock:
            if address not in self._channels:
                self._channels[address] = connect(address, showing(token))
            return self._channels[address]

    def forget(self, address: str) -> None:
        """Close the channel to an address that nobody calls any more."""
        with self._lock:
            channel = self._channels.pop(address, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Close all."""
        for address in list(self._channels):
            self.forget(address)


def call(
    method: Any, request: Any, *, what: str, timeout_s: float, stop: Stop, retry_s: float = 0.0
) -> Any:
    """Call and wait, giving up as soon as `stop` says so.

    Raises:
        Interrupted: `stop` said so; the call is cancelled.
        CallError: it failed; while unreachable it is repeated for up to `retry_s` first.
    """
    give_up = time.monotonic() + retry_s
    while True:
        future = method.future(request, timeout=timeout_s)
        try:
            return _wait(future, stop)
        except grpc.RpcError as error:
            code, details = status_of(error)
            if code in _PLAIN:
                raise CallError(details, refused=True, reason=reason_of(error)) from None
            if code not in RETRIED or time.monotonic() > give_up:
                raise CallError(str(RpcError(what, code, details))) from None
        time.sleep(_POLL_S)


def in_background(action: Callable[[], R], stop: Stop) -> R:
    """Run `action` on a thread of its own and give it up when `stop` says so.

    Raises:
        Interrupted: `stop` said so; the result will be thrown away.
    """
    results: list[R] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        if stop():
            raise Interrupted
    if errors:
        raise errors[0]
    return results[0]


def _wait(future: Any, stop: Stop) -> Any:
    while True:
        if stop():
            future.cancel()
            raise Interrupted
        try:
            return future.result(timeout=_POLL_S)
        except grpc.FutureTimeoutError:
            continue
