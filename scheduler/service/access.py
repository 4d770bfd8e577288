"""Whose jobs a caller may see and act on."""

from collections.abc import Callable, Iterable
from typing import NoReturn

import grpc

from chassis.callers import Callers
from chassis.refusal import refuse
from chassis.roles import Caller
from protos.reason_pb2 import ANOTHER_USERS_JOB
from protos.scheduler_pb2 import JobStatus


class Access:
    """Asked by every method that is about jobs, besides the role that its call was admitted with.

    Args:
        callers: of the server.
        find: a job's status; None for one that is unknown.
    """

    def __init__(self, callers: Callers, find: Callable[[str], JobStatus | None]) -> None:
        self.callers = callers
        self._find = find

    def job(self, job_id: str, context: grpc.ServicerContext) -> JobStatus:
        """A job's status, or the call's end where there is none, or the caller may not see it."""
        status = self._find(job_id)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"job {job_id!r}: unknown")
        self._require(status, job_id, context)
        return status

    def require(self, job_id: str, context: grpc.ServicerContext) -> None:
        """The call's end where the caller may not see a job; one that is unknown is nobody's."""
        self._require(self._find(job_id), job_id, context)

    def seen(self, statuses: Iterable[JobStatus], caller: Caller) -> list[JobStatus]:
        """Those of the jobs that the caller may see."""
        return [one for one in statuses if caller.sees(one.job_id, one.submitted_by)]

    def sees_any(self, job_ids: Iterable[str], caller: Caller) -> bool:
        """Whether the caller may see one of these jobs, or all that there are."""
        found = (status for job_id in job_ids if (status := self._find(job_id)) is not None)
        return caller.sees_all or bool(self.seen(found, caller))

    def _require(
        self, status: JobStatus | None, job_id: str, context: grpc.ServicerContext
    ) -> None:
        caller = self.callers.of(context)
        if not caller.sees(job_id, status.submitted_by if status is not None else ""):
            refuse_job(f"job {job_id}", caller, context)


def refuse_job(what: str, caller: Caller, context: grpc.ServicerContext) -> NoReturn:
    """End a call about a job that the caller may not see."""
    refuse(
        context,
        grpc.StatusCode.PERMISSION_DENIED,
        f"{what}: is not of user {caller.user}; needs the role operate, this token's is "
        f"{caller.role}",
        ANOTHER_USERS_JOB,
    )
