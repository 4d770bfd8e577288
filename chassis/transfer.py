"""Sending content to the scheduler's Artifacts service and fetching it, whole and checked.

Both may be repeated, and are while the scheduler is away: what is sent is known by its digest,
what is fetched goes on where it broke off.
"""

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

import grpc

from chassis.channels import Attempts, call, call_async
from protos.artifacts_pb2 import (
    ArtifactChunk,
    GetArtifactRequest,
    HasRequest,
    PutChunk,
    PutHeader,
)
from protos.artifacts_pb2_grpc import ArtifactsStub

if TYPE_CHECKING:
    from protos.artifacts_pb2_grpc import ArtifactsAsyncStub

CHUNK_BYTES = 1 << 20
_HAS_S = 10.0
_LEAST_BYTES_PER_S = 1 << 20  # what a transfer's deadline allows for
_LEAST_S = 60.0


class TransferError(RuntimeError):
    """What came is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes in an open file, and their digest."""

    stream: BinaryIO
    digest: str
    bytes: int
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @staticmethod
    def of(stream: BinaryIO) -> "Content":
        """All of a file that can be read and sought."""
        stream.seek(0)
        digest, size = hashlib.sha256(), 0
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
        return Content(stream, digest.hexdigest(), size)

    def chunks(self, job_id: str = "", name: str = "") -> Iterator[PutChunk]:
        """The messages that send it, from the beginning.

        An attempt that failed may still be read from when the next one begins, on another thread:
        each keeps a place of its own.
        """
        header = PutHeader(digest=self.digest, bytes=self.bytes, job_id=job_id, name=name)
        yield PutChunk(header=header)
        place = 0
        while True:
            with self._lock:
                if self.stream.closed:  # nobody waits for it any more
                    return
                self.stream.seek(place)
                data = self.stream.read(CHUNK_BYTES)
            if not data:
                return
            place += len(data)
            yield PutChunk(data=data)


def deadline_s(size: int) -> float:
    """Seconds that a transfer of so many bytes may take."""
    return _LEAST_S + size / _LEAST_BYTES_PER_S


def send(
    stub: ArtifactsStub,
    content: Content,
    *,
    what: str,
    job_id: str = "",
    name: str = "",
    retry_s: float = 30.0,
) -> bool:
    """Send content, unless it is there; as a job's file where a name is given.

    Returns:
        Whether bytes were sent.

    Raises:
        RpcError: it was refused, or nobody answered for `retry_s`.
    """
    attempts: Attempts | None = None
    if not name:
        request = HasRequest(digest=content.digest)
        if call(stub.Has, request, what=what, timeout_s=_HAS_S, retry_s=retry_s).here:
            return False
    while True:
        try:
            stub.Put(content.chunks(job_id, name), timeout=deadline_s(content.bytes))
            return True
        except grpc.RpcError as error:
            attempts = attempts or Attempts(what, retry_s)  # an attempt may take longer than that
            wait = attempts.after(error)
        time.sleep(wait)


async def send_async(
    stub: "ArtifactsAsyncStub", content: Content, *, what: str, retry_s: float = 30.0
) -> bool:
    """The same for coroutines, of content that is no job's file yet."""
    attempts: Attempts | None = None
    request = HasRequest(digest=content.digest)
    if (await call_async(stub.Has, request, what=what, timeout_s=_HAS_S, retry_s=retry_s)).here:
        return False
    while True:
        try:
            await stub.Put(content.chunks(), timeout=deadline_s(content.bytes))
            return True
        except grpc.RpcError as error:
            attempts = attempts or Attempts(what, retry_s)
            wait = attempts.after(error)
        await asyncio.sleep(wait)


def fetch(
    stub: ArtifactsStub,
    request: GetArtifactRequest,
    path: Path,
    *,
    what: str,
    most_bytes: int,
    retry_s: float = 30.0,
) -> str:
    """Write content to a file, which appears once it is whole and checked; its digest.

    Args:
        stub: to call.
        request: for a digest, or a job's file.
        path: of the file; one that is there is replaced.
        what: names the purpose in errors.
        most_bytes: beyond which it is refused.
        retry_s: how long the scheduler may be away.

    Raises:
        RpcError: it is not there, or nobody answered for `retry_s`.
        TransferError: it is too large, or was changed on its way.
    """
    attempts = Attempts(what, retry_s)
    with Fetching(request, path, most_bytes, what) as fetching:
        while True:
            try:
                for chunk in stub.Get(fetching.request(), timeout=fetching.timeout_s):
                    fetching.take(chunk)
                break
            except grpc.RpcError as error:
                if fetching.progressed():
                    attempts = Attempts(what, retry_s)
                wait = attempts.after(error)
            time.sleep(wait)
        return fetching.finish()


async def fetch_async(
    stub: "ArtifactsAsyncStub",
    request: GetArtifactRequest,
    path: Path,
    *,
    what: str,
    most_bytes: int,
    retry_s: float = 30.0,
) -> str:
    """The same for coroutines."""
    attempts = Attempts(what, retry_s)
    with Fetching(request, path, most_bytes, what) as fetching:
        while True:
            try:
                async for chunk in stub.Get(fetching.request(), timeout=fetching.timeout_s):
                    fetching.take(chunk)
                break
            except grpc.RpcError as error:
                if fetching.progressed():
                    attempts = Attempts(what, retry_s)
                wait = attempts.after(error)
            await asyncio.sleep(wait)
        return fetching.finish()


class Fetching:
    """A file that is being fetched: checks what comes, and says where to go on."""

    def __init__(self, request: GetArtifactRequest, path: Path, most_bytes: int, what: str) -> None:
        self._request = request
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{token_hex(4)}")
        self._most = most_bytes
        self._what = what
        self._hash = hashlib.sha256()
        self._count = 0
        self._asked = 0  # the count when it was last asked for
        self._bytes: int | None = None
        self._digest = request.digest

    def __enter__(self) -> "Fetching":
        self._stream = self._temporary.open("xb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stream.close()
        self._temporary.unlink(missing_ok=True)

    @property
    def timeout_s(self) -> float:
        """Of the next call."""
        return deadline_s(self._most if self._bytes is None else self._bytes)

    def request(self) -> GetArtifactRequest:
        """For what has not come yet."""
        request = GetArtifactRequest()
        request.CopyFrom(self._request)
        request.offset = self._count
        return request

    def progressed(self) -> bool:
        """Whether anything has come since this was last asked."""
        before, self._asked = self._asked, self._count
        return self._count > before

    def take(self, chunk: ArtifactChunk) -> None:
        """Take in one message.

        Raises:
            TransferError: it is too large, or another than before.
        """
        if chunk.digest:  # the first message of a call
            if self._digest and chunk.digest != self._digest:
                raise TransferError(f"{self._what}: it was replaced meanwhile; fetch it again")
            if chunk.bytes > self._most:
                raise TransferError(
                    f"{self._what}: {chunk.bytes} bytes; expected at most {self._most}"
                )
            self._digest, self._bytes = chunk.digest, chunk.bytes
        self._count += len(chunk.data)
        if self._bytes is None or self._count > self._bytes:
            raise TransferError(f"{self._what}: more came than was said")
        self._hash.update(chunk.data)
        self._stream.write(chunk.data)

    def finish(self) -> str:
        """Give the file its name, once all has come; its digest.

        Raises:
            TransferError: it is not what it should be.
        """
        if self._count != (self._bytes or 0) or self._hash.hexdigest() != self._digest:
            raise TransferError(
                f"{self._what}: {self._count} bytes came with the digest "
                f"{self._hash.hexdigest()}; expected {self._bytes} with {self._digest}"
            )
        self._stream.close()
        os.replace(self._temporary, self._path)
        return self._digest
