"""The gRPC service of what travels with jobs."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc

from chassis.files import lacks_room
from chassis.refusal import refuse
from chassis.roles import Role
from protos.artifacts_pb2 import (
    Artifact,
    ArtifactChunk,
    GetArtifactRequest,
    HasReply,
    HasRequest,
    ListArtifactsReply,
    ListArtifactsRequest,
    PutChunk,
    PutReply,
    RemoveArtifactsReply,
    RemoveArtifactsRequest,
)
from protos.artifacts_pb2_grpc import ArtifactsServicer
from protos.reason_pb2 import DISK_FULL
from scheduler.service.access import Access, refuse_job
from scheduler.service.artifacts import (
    ArtifactError,
    Artifacts,
    FullError,
    MissingError,
    check_name,
)

_MAX_TRANSFERS = 48  # each holds a thread
_CHUNK_BYTES = 1 << 20
_log = logging.getLogger("heterps.artifacts")


class ArtifactsService(ArtifactsServicer):
    """The gRPC methods; all state lies in `artifacts`.

    Args:
        artifacts: what is kept.
        is_over: whether a job has ended or is unknown: it gets no more files.
        access: whose jobs a caller may see.
    """

    def __init__(
        self, artifacts: Artifacts, is_over: Callable[[str], bool], access: Access
    ) -> None:
        self._artifacts = artifacts
        self._is_over = is_over
        self._access = access
        self._transfers = threading.BoundedSemaphore(_MAX_TRANSFERS)

    def Has(self, request: HasRequest, context: grpc.ServicerContext) -> HasReply:  # noqa: N802
        """Whether content is here, and how much may be sent."""
        with _refusing(context):
            self._artifacts.require_room(request.room)
        here = bool(request.digest) and self._artifacts.has(request.digest)
        return HasReply(here=here, code_limit=self._artifacts.code_limit_bytes)

    def Put(self, request_iterator: Iterator[PutChunk], context: grpc.ServicerContext) -> PutReply:  # noqa: N802
        """Keep content, and name it where it is a job's."""
        first = next(request_iterator, PutChunk())
        header = first.header
        if header.job_id:
            self._access.require(header.job_id, context)
        elif (caller := self._access.callers.of(context)).role is Role.JOB:
            refuse_job("code of a job to come", caller, context)
        with self._transfer(context), _refusing(context):
            if header.job_id:
                check_name(header.name)
                if self._is_over(header.job_id):
                    context.abort(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"job {header.job_id}: unknown or ended; expected one that runs",
                    )
            elif header.bytes > self._artifacts.code_limit_bytes:
                context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"code of {header.bytes} bytes; expected at most "
                    f"{self._artifacts.code_limit_bytes} (heterps scheduler --code-limit)",
                )

            def chunks() -> Iterator[bytes]:
                yield first.data
                for chunk in request_iterator:
                    self._access.callers.of(context)  # its token may have been revoked since
                    yield chunk.data

            created = self._artifacts.receive(header.digest, header.bytes, chunks())
            if header.job_id:
                self._artifacts.name(header.job_id, header.name, header.digest)
        return PutReply(created=created)

    def Get(  # noqa: N802
        self, request: GetArtifactRequest, context: grpc.ServicerContext
    ) -> Iterator[ArtifactChunk]:
        """Content by its digest, or a job's file by its name."""
        if request.digest:
            self._require_one_of(self._artifacts.jobs_of(request.digest), request.digest, context)
        else:
            self._access.require(request.job_id, context)
        with self._transfer(context), _refusing(context):
            stream, kept = self._artifacts.open(request.digest, request.job_id, request.name)
            with stream:
                stream.seek(min(request.offset, kept.bytes))
                yield ArtifactChunk(bytes=kept.bytes, digest=kept.digest)
                while (data := stream.read(_CHUNK_BYTES)) and context.is_active():
                    self._access.callers.of(context)
                    yield ArtifactChunk(data=data)

    def List(  # noqa: N802
        self, request: ListArtifactsRequest, context: grpc.ServicerContext
    ) -> ListArtifactsReply:
        """A job's files by name."""
        self._access.require(request.job_id, context)
        files = self._artifacts.files(request.job_id)
        return ListArtifactsReply(
            files=[Artifact(name=n, digest=k.digest, bytes=k.bytes) for n, k in files.items()]
        )

    def Remove(  # noqa: N802
        self, request: RemoveArtifactsRequest, context: grpc.ServicerContext
    ) -> RemoveArtifactsReply:
        """Remove a job's files while it runs."""
        self._access.require(request.job_id, context)
        with _refusing(context):
            removed = 0
            if not self._is_over(request.job_id):
                removed = self._artifacts.remove(request.job_id, request.name)
        return RemoveArtifactsReply(removed=removed)

    def _require_one_of(
        self, job_ids: list[str], digest: str, context: grpc.ServicerContext
    ) -> None:
        """The call's end where content is of no job that the caller may see."""
        caller = self._access.callers.of(context)
        if not self._access.sees_any(job_ids, caller):
            refuse_job(f"content {digest[:80]!r}", caller, context)

    @contextmanager
    def _transfer(self, context: grpc.ServicerContext) -> Iterator[None]:
        if not self._transfers.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.UNAVAILABLE, f"{_MAX_TRANSFERS} transfers run; try again later"
            )
        try:
            yield
        finally:
            self._transfers.release()


@contextmanager
def _refusing(context: grpc.ServicerContext) -> Iterator[None]:
    """Turn what is refused into the call's status."""
    try:
        yield
    except FullError as error:
        refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)[:2000], DISK_FULL)
    except MissingError as error:
        _abort(context, grpc.StatusCode.NOT_FOUND, error)
    except ArtifactError as error:
        _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)
    except OSError as error:
        if lacks_room(error):
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)[:2000], DISK_FULL)
        _log.exception("artifacts")
        _abort(context, grpc.StatusCode.INTERNAL, error)


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, error: Exception) -> NoReturn:
    context.abort(code, str(error)[:2000])
