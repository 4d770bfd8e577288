"""Proposals for a job while it runs."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from protos import decision_pb2
from protos import scheduler_pb2 as pb
from scheduler.replanning.measure import Measurement
from scheduler.replanning.recommendation import Recommendation
from scheduler.state.store import Store, StoreError

if TYPE_CHECKING:
    from scheduler.replanning.proposal import Proposal

FIRST_S = 20.0
MOST_S = 600.0
_IDLE = 100.0  # planning takes at most one part in so many of one core's time
_log = logging.getLogger("heterps.replan")


class Watch:
    """Considers a running job from time to time, on a thread of its own, while entered.

    Keeps what was measured and the standing proposal in the store.

    Args:
        measured: what was measured so far, and the samples trained; called from the thread.
        fresh: makes a proposal from these.
        first_s: seconds to the first consideration; each later one waits twice as long.
    """

    def __init__(
        self,
        job_id: str,
        store: Store,
        measured: Callable[[], tuple[Measurement, int]],
        fresh: "Callable[[Measurement, int], Proposal | None]",
        first_s: float = FIRST_S,
    ) -> None:
        self._job_id = job_id
        self._store = store
        self._measured = measured
        self._fresh = fresh
        self._first_s = first_s
        self._recommendation = Recommendation()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=f"replan {job_id}", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._keep(self._measured()[0])

    def _loop(self) -> None:
        wait_s = self._first_s
        while not self._stop.wait(wait_s):
            began = time.monotonic()
            try:
                self._consider()
            except Exception:  # the job goes on whatever becomes of advice about it
                _log.exception("job %s: considering another plan", self._job_id)
            took_s = time.monotonic() - began
            wait_s = max(min(2 * wait_s, MOST_S), _IDLE * took_s)

    def _consider(self) -> None:
        measurement, samples = self._measured()
        if not measurement.counts:
            return
        fresh = self._fresh(measurement, samples)
        if fresh is None:
            return
        before = self._recommendation.proposal
        now = self._recommendation.consider(fresh)
        if now is not None and (before is None or before.target != now.target):
            _log.info("job %s: %s", self._job_id, " ".join(now.reasons))
        elif now is None and before is not None:
            _log.info("job %s: the proposal is withdrawn", self._job_id)
        self._keep(measurement)

    def _keep(self, measurement: Measurement) -> None:
        if not measurement.counts:
            return
        record = pb.Replan(measurement=measurement.to_message())
        if self._recommendation.proposal is not None:
            record.proposal.CopyFrom(self._recommendation.proposal.to_message())
        try:
            self._store.put_replan(self._job_id, record)
        except StoreError as error:
            _log.warning("job %s: %s; what was measured is kept later", self._job_id, error)


def watch(
    job_id: str,
    decision: decision_pb2.Decision,
    so_far: Callable[[], tuple[Measurement, int]],
    store: Store,
    restart_s: float,
) -> Watch:
    """A watch over the run of `decision`, to be entered when it begins.

    Args:
        so_far: what was measured so far, and the samples trained.
        restart_s: seconds that the job's processes took to start, as they would again.
    """

    def fresh(measurement: Measurement, samples: int) -> "Proposal | None":
        # These bring NumPy: only when they are needed.
        from scheduler.decision.record import Decision
        from scheduler.replanning.proposal import Moving
        from scheduler.replanning.replan import propose

        left = decision.workload.samples - samples
        if left <= 0:
            return None
        moving = Moving(restart_s=restart_s)
        return propose(Decision.from_message(decision), measurement, left, moving=moving)

    return Watch(job_id, store, so_far, fresh)
