"""The gRPC service that answers with histories."""

from collections.abc import Callable, Sequence

import grpc

from chassis.refusal import refuse
from chassis.roles import Role
from protos.history_pb2 import JobHistory, ShardPlace
from protos.history_pb2_grpc import HistoryServicer
from protos.reason_pb2 import STORE_UNREACHABLE
from protos.scheduler_pb2 import JobRequest
from scheduler.runs.plans import plans_of
from scheduler.service.access import Access
from scheduler.state.history import Histories
from scheduler.state.store import Store, StoreError


class HistoryService(HistoryServicer):
    """Answers with a history.

    Args:
        store: of the plans that jobs have trained under.
        access: whose jobs a caller may see.
        shards: label and address of the shards that a job runs on.
        job_token: the token that those of them ask for that are its own; empty where none is.
    """

    def __init__(
        self,
        histories: Histories,
        store: Store,
        access: Access,
        shards: Callable[[str], Sequence[tuple[str, str]]],
        job_token: Callable[[str], str],
    ) -> None:
        self._histories = histories
        self._store = store
        self._access = access
        self._shards = shards
        self._job_token = job_token

    def GetHistory(self, request: JobRequest, context: grpc.ServicerContext) -> JobHistory:  # noqa: N802
        """A job's history."""
        job_id = request.job_id
        status = self._access.job(job_id, context)
        try:
            found = self._histories.get(job_id)
            found.plans.extend(plans_of(self._store, status))
        except StoreError as error:
            refuse(context, grpc.StatusCode.UNAVAILABLE, str(error), STORE_UNREACHABLE)
        acts = self._access.callers.of(context).role.covers(Role.JOB)
        token = self._job_token(job_id) if acts else ""
        found.shards.extend(
            ShardPlace(label=label, address=address, token=token)
            for label, address in self._shards(job_id)
        )
        return found
