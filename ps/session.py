"""A client's connections to its shards, and the calls over them."""

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import uuid4

import grpc

from protos.channels import RpcError, call, connect
from protos.parameter_server_pb2_grpc import ParameterServerStub
from ps.errors import ShardError

T = TypeVar("T")
_SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_PATH = "/heterps.v1.ParameterServer/"


class Shard:
    """One shard as a client sees it."""

    def __init__(self, index: int, address: str, timeout_s: float) -> None:
        self.index = index
        self.address = address
        self._timeout_s = timeout_s
        self._channel = connect(address)
        self.stub = ParameterServerStub(self._channel)
        # Bytes in and out: the payloads never pass through protobuf.
        self.pull: Callable[..., bytes] = self._channel.unary_unary(_PATH + "Pull")
        self.push: Callable[..., bytes] = self._channel.unary_unary(_PATH + "Push")
        self._sequence = itertools.count(1)

    def next_sequence(self) -> int:
        """The number of the next push to this shard."""
        return next(self._sequence)

    def call(
        self, method: Callable[..., T], request: object, what: str, timeout_s: float | None = None
    ) -> T:
        """Call and, while the shard cannot be reached, repeat; every method of it may be.

        Raises:
            ShardError: no answer in time, or a refusal.
        """
        limit = timeout_s or self._timeout_s
        try:
            return call(method, request, what=what, timeout_s=limit, retry_s=self._timeout_s)
        except RpcError as error:
            if error.code in _SILENT:
                text = f"did not answer within {limit:g} s ({what}: {error.details})"
            else:
                text = f"refused {what}: {error.details} ({error.code.name})"
            raise ShardError(self.index, self.address, error.code, text) from None

    def close(self) -> None:
        """Close the connection; calls under way fail."""
        self._channel.close()


class Session:
    """The connections of one process. A forked child must make its own.

    Attributes:
        client, epoch: with a push's sequence they name it to a shard, once and for all.
    """

    def __init__(self, addresses: Sequence[str], timeout_s: float, client: str | None) -> None:
        self.pid = os.getpid()
        self.client = client or f"{socket.gethostname()[:64]}-{self.pid}-{uuid4().hex[:12]}"
        self.epoch = time.time_ns()
        self.shards = [Shard(i, a, timeout_s) for i, a in enumerate(addresses)]
        self._pool = ThreadPoolExecutor(
            min(64, 4 * len(self.shards)), thread_name_prefix="ps-client"
        )

    def submit(self, works: Sequence[Callable[[], Any]]) -> list["Future[Any]"]:
        """Start calls side by side."""
        return [self._pool.submit(work) for work in works]

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Make calls side by side, the last on this thread; the first error once all are done."""
        if not works:
            return []
        futures = self.submit(works[:-1])
        last: Future[T] = Future()
        try:
            last.set_result(works[-1]())
        except Exception as error:
            last.set_exception(error)
        return settle([*futures, last])

    def close(self) -> None:
        """Wait for what was started, then disconnect."""
        self._pool.shutdown(wait=True)
        for shard in self.shards:
            shard.close()


def settle(futures: Sequence["Future[T]"]) -> list[T]:
    """Wait for all; their results, or the first error in the order given."""
    errors = [error for error in [f.exception() for f in futures] if error is not None]
    if errors:
        raise errors[0]
    return [f.result() for f in futures]


def combine(futures: Sequence["Future[Any]"], finish: Callable[[list[Any]], T]) -> "Future[T]":
    """A future of finish(results) once all are done; finish runs on the last one's thread."""
    combined: Future[T] = Future()
    combined.set_running_or_notify_cancel()
    if not futures:
        combined.set_result(finish([]))
        return combined
    left = itertools.count(len(futures) - 1, -1)
    lock = threading.Lock()

    def done(_: "Future[Any]") -> None:
        with lock:
            last = next(left) == 0
        if not last:
            return
        try:
            combined.set_result(finish(settle(futures)))
        except Exception as error:
            combined.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return combined
