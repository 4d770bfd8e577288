"""The gRPC service that answers with histories."""

from collections.abc import Callable, Sequence

import grpc

from chassis.refusal import refuse
from protos.history_pb2 import JobHistory, ShardPlace
from protos.history_pb2_grpc import HistoryServicer
from protos.reason_pb2 import STORE_UNREACHABLE
from protos.scheduler_pb2 import JobRequest
from scheduler.state.history import Histories
from scheduler.state.store import StoreError


class HistoryService(HistoryServicer):
    """Answers with a history.

    Args:
        knows: whether there is such a job.
        shards: label and address of the shards that a job runs on.
    """

    def __init__(
        self,
        histories: Histories,
        knows: Callable[[str], bool],
        shards: Callable[[str], Sequence[tuple[str, str]]],
    ) -> None:
        self._histories = histories
        self._knows = knows
        self._shards = shards

    def GetHistory(self, request: JobRequest, context: grpc.ServicerContext) -> JobHistory:  # noqa: N802
        """A job's history."""
        job_id = request.job_id
        if not self._knows(job_id):
            context.abort(grpc.StatusCode.NOT_FOUND, f"job {job_id!r}: unknown")
        try:
            found = self._histories.get(job_id)
        except StoreError as error:
            refuse(context, grpc.StatusCode.UNAVAILABLE, str(error), STORE_UNREACHABLE)
        found.shards.extend(
            ShardPlace(label=label, address=address) for label, address in self._shards(job_id)
        )
        return found
