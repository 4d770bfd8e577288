"""Workers that train are replaced by others elsewhere, which are started before they end."""

import logging
import time
from collections.abc import Sequence

from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import END_NO_CAPACITY
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import Interrupted
from scheduler.runs.changes.regroup import Instead, launched, regroup
from scheduler.runs.cleanup import stop_others
from scheduler.runs.failures import JobError
from scheduler.runs.launch import stop_job, worker_of
from scheduler.runs.processes import Process
from scheduler.runs.sharing import Home
from scheduler.state.endings import Ending

_log = logging.getLogger("heterps.runner")


def go_elsewhere(
    attempt: Attempt,
    leaving: Sequence[Process],
    homes: Sequence[Home],
    cause: Ending,
    within_s: float,
) -> bool:
    """Have workers that train replaced by others, once these listen; False: they did not start.

    Args:
        homes, within_s: as of `_start`.

    Raises:
        JobError, Interrupted: as of `regroup`.
    """
    try:
        instead = _start(attempt, leaving, homes, within_s)
    except JobError as error:
        _log.warning("job %s: %s", attempt.id.job_id, error)
        return False
    addresses = [worker.node.address for worker in leaving]
    channels = attempt.context.channels
    for text in stop_job(attempt.id, addresses, channels, 0.0, leaving).values():
        _log.info("%s", text)  # it is gone already, or will be soon
    regroup(attempt, leaving, cause, instead)
    return True


def _start(
    attempt: Attempt, leaving: Sequence[Process], homes: Sequence[Home], within_s: float
) -> Instead:
    """Start workers that are to be in the place of some, which train meanwhile.

    Args:
        homes: for each of these; what was reserved for them is given back where it fails.
        within_s: seconds that there are for it.

    Raises:
        JobError: one did not start, or not before the time was over or one of those that train
            broke, which is more urgent; none of them is left.
        Interrupted: the job is cancelled, or another scheduler has taken over.
    """
    until = time.monotonic() + within_s
    generation = attempt.record.launched_generation()
    news = {
        one.process_id: worker_of(
            attempt.id, one.index, one.rank, home.node, generation, shares=home.shared
        )
        for one, home in zip(leaving, homes, strict=True)
    }
    attempt.record.add_others([*news.values()])
    follower = attempt.follower
    text = f"workers elsewhere did not start within {within_s:.0f} s, or others broke meanwhile"
    late = Ending(END_NO_CAPACITY, text)

    def stop() -> bool:
        broken = follower is not None and follower.is_broken
        return broken or attempt.is_cancelled() or time.monotonic() > until

    try:
        processes = launched(attempt, attempt.spec() or JobSpec(), news, generation, stop)
    except (JobError, Interrupted) as error:
        attempt.record.hold()
        stop_others(attempt, [*news.values()])
        if attempt.is_cancelled() or isinstance(error, JobError):
            raise
        raise JobError(late) from None
    pairs = zip(attempt.processes, processes, strict=True)
    return Instead(generation, {b.process_id: a for b, a in pairs if b.process_id in news})
