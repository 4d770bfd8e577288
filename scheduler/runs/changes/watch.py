"""Proposals for a job while it runs."""

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from protos import scheduler_pb2 as pb
from protos.job_pb2 import JobSpec
from scheduler.replanning.measure import Measurement
from scheduler.replanning.recommendation import Recommendation
from scheduler.runs.attempt import Attempt
from scheduler.runs.change import ChangeRefusedError, PlanChange
from scheduler.runs.changes import under_way
from scheduler.runs.changes.anew import Joins, for_job, on_nodes_now, past_of, propose_now
from scheduler.runs.changes.deadline import may_be_struck
from scheduler.runs.offer import OfferError
from scheduler.runs.sharing import sharing
from scheduler.state.store import Store, StoreError

if TYPE_CHECKING:
    from scheduler.replanning.proposal import Proposal

FIRST_S = 20.0
MOST_S = 600.0
_LOOK_S = 1.0
_JOINED = 4  # the next three considerations: a proposal stands after two, one may come too early
_IDLE = 100.0  # planning takes at most one part in so many of one core's time
_log = logging.getLogger("heterps.replan")


class Watch:
    """Considers a running job from time to time, on a thread of its own, while entered.

    Keeps what was measured and the standing proposal in the store.

    Args:
        measured: what was measured so far, and the samples trained; called from the thread.
        fresh: makes a proposal from these.
        first_s: seconds to the first consideration; each later one waits twice as long.
        act: told of each proposal, whether it stands or not, and of what it rests on.
        hurries: asked often; whether to consider at once, and then as often as at first.
    """

    def __init__(
        self,
        job_id: str,
        store: Store,
        measured: Callable[[], tuple[Measurement, int]],
        fresh: "Callable[[Measurement, int], Proposal | None]",
        first_s: float = FIRST_S,
        act: "Callable[[Proposal, Measurement], None]" = lambda proposal, measurement: None,
        hurries: Callable[[], bool] = lambda: False,
    ) -> None:
        self._job_id = job_id
        self._store = store
        self._measured = measured
        self._fresh = fresh
        self._first_s = first_s
        self._act = act
        self._hurries = hurries
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
        due = time.monotonic() + wait_s
        while not self._stop.wait(min(_LOOK_S, max(0.0, due - time.monotonic()))):
            began = time.monotonic()
            if self._hurries():
                wait_s, due = self._first_s / 2, began
            if began < due:
                continue
            try:
                self._consider()
            except Exception:  # the job goes on whatever becomes of advice about it
                _log.exception("job %s: considering another plan", self._job_id)
            took_s = time.monotonic() - began
            wait_s = max(min(2 * wait_s, MOST_S), _IDLE * took_s)
            due = time.monotonic() + wait_s

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
        self._act(fresh, measurement)

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


def watch(attempt: Attempt) -> Watch:
    """A watch over an attempt that trains, as its job's `schedule.replan` has it."""
    from scheduler.replanning.moves import Answer, InARow  # brings NumPy

    job_id, context, follower = attempt.id.job_id, attempt.context, attempt.follower
    assert follower is not None
    spec = attempt.spec() or JobSpec()
    mode, elastic = spec.schedule.replan, spec.schedule.HasField("elastic")
    joins = Joins(context.nodes)
    joined = 0  # considerations for which nodes that came still count

    def hurries() -> bool:
        nonlocal joined
        if not (mode == "auto" or elastic) or not joins.seen():
            return False
        joined = _JOINED
        return True

    def fresh(measurement: Measurement, samples: int) -> "Proposal | None":
        nonlocal joined
        joined = max(0, joined - 1)
        if (mode == "off" and not joined) or attempt.change is not None:
            return None
        if sharing(attempt.processes):  # what is measured is of shared units
            return None
        try:
            offered = on_nodes_now(attempt, spec) if mode == "auto" or joined else None
        except OfferError:
            return None
        return propose_now(attempt, spec, measurement, offered=offered)

    rule = InARow()

    def act(proposal: "Proposal", measurement: Measurement) -> None:
        status = context.jobs.get(job_id)
        if status is None or not (mode == "auto" or joined):
            return
        if any(move.reason == "deadline" and not move.failed for move in status.moves):
            return  # it needs units that stay, whatever others would cost
        answer = rule.consider(proposal, measurement, past_of(status, spec))
        if answer is not Answer.MOVE:
            _log.info("job %s: it does not move: %s", job_id, answer.name.lower())
            return
        reason = "joined" if joined else "replanned"
        plan = for_job(proposal.proposed.to_message(), attempt.decision)
        dated = spec.schedule.finish_by_hours and not may_be_struck(attempt.decision)
        if dated and may_be_struck(plan):
            return  # its deadline was not made to allow for that
        try:
            under_way.request(attempt, PlanChange(reason, plan))
        except ChangeRefusedError as error:
            _log.warning("job %s: it does not move: %s", job_id, error)

    store, so_far = context.store, follower.so_far
    return Watch(job_id, store, so_far, fresh, FIRST_S, act, hurries)
