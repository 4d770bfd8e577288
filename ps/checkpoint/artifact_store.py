"""Checkpoints that the scheduler keeps: for clusters whose machines share no disk.

Every shard sends its own files, so they meet in one place; a client fetches them from there.
"""

import errno
import io
import tempfile
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO, TypeVar, cast

import grpc

from chassis.channels import RpcError, call, connect, status_of
from chassis.transfer import Content, deadline_s, send
from protos.artifacts_pb2 import (
    Artifact,
    GetArtifactRequest,
    HasRequest,
    ListArtifactsRequest,
    RemoveArtifactsRequest,
)
from protos.artifacts_pb2_grpc import ArtifactsStub
from protos.naming import KEPT, kept_place
from protos.reason_pb2 import DISK_FULL
from ps.checkpoint.store import Written
from ps.errors import CheckpointError

R = TypeVar("R")
_CALL_S = 20.0
_RETRY_S = 60.0  # a scheduler may be started again while a model is saved
_SPOOL_BYTES = 32 << 20  # in memory, more goes to a temporary file
_READ_S = 600.0
_channels: dict[str, grpc.Channel] = {}
_lock = threading.Lock()


class ArtifactStore:
    """A job's files, or a folder of them, as a `ps.checkpoint.store.Store`."""

    def __init__(self, url: str) -> None:
        try:
            self._address, self._job_id, folder = kept_place(url)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        self._prefix = f"{folder}/" if folder else ""
        with _lock:
            if self._address not in _channels:
                _channels[self._address] = connect(self._address)
            self._stub = ArtifactsStub(_channels[self._address])

    @property
    def url(self) -> str:
        """The URL given."""
        return f"{KEPT}{self._address}/{self._job_id}/{self._prefix}".rstrip("/")

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
        """See Store. What is sent is on this machine's disk first, so that it can be sent again."""
        with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
            for chunk in chunks:
                spool.write(chunk)
            content = Content.of(cast(BinaryIO, spool))
            try:
                send(
                    self._stub,
                    content,
                    what=self._what(f"keep {name}"),
                    job_id=self._job_id,
                    name=self._prefix + name,
                    retry_s=_RETRY_S,
                )
            except RpcError as error:
                raise _as_of_a_disk(error) from None
        return Written(content.bytes, content.digest)

    def require_room(self, size: int) -> None:
        """See that so many bytes would be taken now.

        Raises:
            OSError: they would not.
        """
        self._call(self._stub.Has, HasRequest(room=size), f"keep {size:,} bytes or more")

    def replace(self, name: str, data: bytes | memoryview) -> None:
        """See Store."""
        self.write(name, [data])

    def open(self, name: str) -> BinaryIO:
        """See Store."""
        request = GetArtifactRequest(job_id=self._job_id, name=self._prefix + name)
        return cast(BinaryIO, io.BufferedReader(_Reading(self._stub, request, self._what(name))))

    def size(self, name: str) -> int:
        """See Store."""
        for file in self._files():
            if file.name == self._prefix + name:
                return file.bytes
        raise FileNotFoundError(self._what(f"{name} is not kept"))

    def entries(self) -> list[str]:
        """See Store."""
        inside = [f.name.removeprefix(self._prefix) for f in self._files()]
        return sorted({name.partition("/")[0] for name in inside})

    def remove(self, folder: str) -> None:
        """See Store."""
        request = RemoveArtifactsRequest(job_id=self._job_id, name=self._prefix + folder)
        self._call(self._stub.Remove, request, f"remove {folder}")

    def alone(self) -> AbstractContextManager[bool]:
        """See Store. Of one name, the file that came last counts."""
        return nullcontext(False)

    def _files(self) -> list[Artifact]:
        reply = self._call(self._stub.List, ListArtifactsRequest(job_id=self._job_id), "list")
        return [file for file in reply.files if file.name.startswith(self._prefix)]

    def _call(self, method: Callable[..., R], request: object, purpose: str) -> R:
        try:
            return call(
                method,
                request,
                what=self._what(purpose),
                timeout_s=_CALL_S,
                retry_s=_RETRY_S,
            )
        except RpcError as error:
            raise _as_of_a_disk(error) from None

    def _what(self, purpose: str) -> str:
        return f"scheduler {self._address}: files of job {self._job_id}: {purpose}"


def _as_of_a_disk(error: RpcError) -> OSError:
    """The error that a disk of this machine's own would give."""
    full = error.reason == DISK_FULL
    return OSError(errno.ENOSPC, str(error)) if full else OSError(str(error))


class _Reading(io.RawIOBase):
    """A file that is being fetched, as a stream."""

    def __init__(self, stub: ArtifactsStub, request: GetArtifactRequest, what: str) -> None:
        self._what = what
        self._rest = b""
        self._call = stub.Get(request, timeout=deadline_s(0) + _READ_S)
        self._next()  # whether it is there is known now, not at the first byte

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        if not self._rest and not self._next():
            return 0
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._call.cancel()
        super().close()

    def _next(self) -> bool:
        """Take the next bytes in; False at the end."""
        try:
            for chunk in self._call:
                self._rest = chunk.data
                if self._rest or chunk.digest:
                    return True
        except grpc.RpcError as error:
            code, details = status_of(error)
            if code is grpc.StatusCode.NOT_FOUND:
                raise FileNotFoundError(f"{self._what}: {details}") from None
            raise OSError(f"{self._what}: {details}") from None
        return False
