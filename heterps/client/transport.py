"""A scheduler's services over either kind of channel, so that a procedure is written once.

A procedure is a coroutine over a `Transport`. One that is `ASYNC` waits on an event loop; one that
is `BLOCKING` blocks the thread and never suspends, so that `run` takes a procedure over it from
beginning to end without a loop.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import grpc
from google.protobuf.message import Message

from chassis import transfer
from chassis.channels import RpcError, call, call_async, connect, connect_async
from heterps.client import calls
from heterps.client.calls import Call
from heterps.errors import FetchError
from heterps.home.target import Target
from protos.access_pb2_grpc import AccessStub
from protos.artifacts_pb2 import GetArtifactRequest
from protos.artifacts_pb2_grpc import ArtifactsStub
from protos.history_pb2_grpc import HistoryStub
from protos.scheduler_pb2_grpc import SchedulerStub

R = TypeVar("R")
P = ParamSpec("P")


def _at_once(action: Callable[P, R]) -> Callable[P, Awaitable[R]]:
    """What blocks, as a coroutine that never suspends."""

    async def done(*args: P.args, **kwargs: P.kwargs) -> R:
        return action(*args, **kwargs)

    return done


def _do(action: Callable[[], R]) -> R:
    return action()


async def _stream_at_once(replies: Iterable[R]) -> AsyncIterator[R]:
    for reply in replies:
        yield reply


@dataclass(frozen=True, slots=True)
class Waiting:
    """How the answers of a kind of channel are waited for."""

    connect: Callable[..., Any]
    call: Callable[..., Awaitable[Any]]
    send: Callable[..., Awaitable[object]]
    fetch: Callable[..., Awaitable[object]]
    stream: Callable[[Any], AsyncIterator[Any]]
    sleep: Callable[[float], Awaitable[None]]
    work: Callable[..., Awaitable[Any]]


ASYNC = Waiting(
    connect_async,
    call_async,
    transfer.send_async,
    transfer.fetch_async,
    aiter,
    asyncio.sleep,
    asyncio.to_thread,
)
BLOCKING = Waiting(
    connect,
    _at_once(call),
    _at_once(transfer.send),
    _at_once(transfer.fetch),
    _stream_at_once,
    _at_once(time.sleep),
    _at_once(_do),
)


class Transport:
    """A connection to a scheduler; failures of all its methods are told in words.

    Args:
        waiting: `BLOCKING`, or `ASYNC` where an event loop runs.
    """

    def __init__(self, target: Target, waiting: Waiting) -> None:
        self._target = target
        self._waiting = waiting
        self.channel = waiting.connect(target.address, target.credentials())
        # The generated stubs serve both kinds of channel.
        self._artifacts: Any = ArtifactsStub(self.channel)
        self._services: dict[str, Any] = {
            "": SchedulerStub(self.channel),
            "Access": AccessStub(self.channel),
            "Artifacts": self._artifacts,
            "History": HistoryStub(self.channel),
        }

    async def call(self, one: Call[R]) -> R:
        """Make a call; the answer as it reads it."""
        service, _, method = one.method.rpartition(".")
        try:
            reply = await self._waiting.call(
                getattr(self._services[service], method),
                one.request,
                what=self._named(one.what),
                timeout_s=one.timeout_s,
                retry_s=one.retry_s,
            )
        except RpcError as error:
            raise calls.explain(self._target, error, one.job_id) from None
        return one.read(reply)

    async def send(self, content: transfer.Content, what: str) -> None:
        """Let the scheduler keep content that it does not have yet."""
        await self._moved(self._waiting.send(self._artifacts, content, what=self._named(what)))

    async def fetch(
        self, request: GetArtifactRequest, path: Path, what: str, most_bytes: int
    ) -> None:
        """Bring content from the scheduler into a file."""
        named = self._named(what)
        await self._moved(
            self._waiting.fetch(self._artifacts, request, path, what=named, most_bytes=most_bytes)
        )

    async def stream(
        self, method: str, request: Message, what: str, job_id: str
    ) -> AsyncIterator[Any]:
        """What comes on a stream of the Scheduler service.

        Args:
            what: it is opened for.
        """
        try:
            replies = getattr(self._services[""], method)(request)
            async for reply in self._waiting.stream(replies):
                yield reply
        except grpc.RpcError as error:
            raise calls.broken(self._target, what, job_id, error) from None

    async def work(self, action: Callable[[], R]) -> R:
        """Do what takes this machine a while, off the event loop where there is one."""
        result: R = await self._waiting.work(action)
        return result

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await self._waiting.sleep(seconds)

    def _named(self, what: str) -> str:
        return f"scheduler {self._target.address}: {what}"

    async def _moved(self, transferred: Awaitable[object]) -> None:
        try:
            await transferred
        except transfer.TransferError as error:
            raise FetchError(str(error)) from None
        except RpcError as error:
            raise calls.explain(self._target, error) from None


def run(procedure: Awaitable[R]) -> R:
    """Do a procedure over a `BLOCKING` transport; its result."""
    try:
        next(procedure.__await__())
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("a procedure over a blocking transport waits for an event loop")


def iterate(procedure: AsyncIterator[R]) -> Iterator[R]:
    """What a procedure over a `BLOCKING` transport yields."""
    try:
        while True:
            try:
                item = run(anext(procedure))
            except StopAsyncIteration:
                return
            yield item
    finally:
        if isinstance(procedure, AsyncGenerator):
            run(procedure.aclose())
