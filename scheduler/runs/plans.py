"""The plans that a job has trained under, each with what was predicted and measured of it."""

import logging
import time
from typing import Final

from protos.decision_pb2 import Decision, Measured
from protos.scheduler_pb2 import JobStatus, Move, PlanHistory, PlanUse, ProgressReport
from scheduler.runs.attempt import Attempt
from scheduler.runs.bill import price_before, price_since
from scheduler.state.store import Store, StoreError

# What makes a decision large: kilobytes a layer, where its figures are a few hundred bytes.
_BULKY: Final = (
    "workload",
    "resources",
    "probabilities",
    "alternatives",
    "training",
    "pareto",
    "relaxations",
    "reasons",
)
_log = logging.getLogger("heterps.runner")


def in_brief(decision: Decision) -> Decision:
    """A decision's figures and stages."""
    brief = Decision()
    brief.CopyFrom(decision)
    for name in _BULKY:
        brief.ClearField(name)
    return brief


def plans_of(store: Store, status: JobStatus) -> list[PlanUse]:
    """All of a job, the oldest first; none where it has not trained.

    Raises:
        StoreError: they cannot be read.
    """
    history, decision = store.plans(status.job_id), store.decision(status.job_id)
    if decision is not None and status.started_at:
        _bring_up(history, status, decision)
    return list(history.plans)


def measured(attempt: Attempt, report: ProgressReport) -> Measured:
    """What a run came to, by a report of the worker whose progress is the job's."""
    assert attempt.follower is not None
    status, price = _status(attempt), attempt.decision.price_per_hour
    before, since = price_before(status, price), price_since(status, price, time.time())
    return attempt.follower.measured(attempt.decision, report, before, since)


def keep_begun(attempt: Attempt) -> None:
    """Keep the plan that an attempt begins to train under; not where Redis is away."""
    store, job_id = attempt.context.store, attempt.id.job_id
    try:
        history = store.plans(job_id)
        _bring_up(history, _status(attempt), attempt.decision)
        store.put_plans(job_id, history)
    except StoreError as error:
        _log.warning("job %s: %s; its plan is not among those of its history", job_id, error)


def keep_moved(attempt: Attempt, before: Decision, move: Move) -> None:
    """Keep the plan that an attempt has left, and when and why the one that it has began."""
    store, job_id = attempt.context.store, attempt.id.job_id
    history = attempt.persist(lambda: store.plans(job_id))
    _bring_up(history, _status(attempt), before)
    history.plans.add(
        decision=in_brief(attempt.decision),
        began_at=move.at,
        from_step=move.step,
        reason=move.reason,
        attempt=attempt.id.number,
    )
    attempt.persist(lambda: store.put_plans(job_id, history))


def _status(attempt: Attempt) -> JobStatus:
    found = attempt.context.jobs.get(attempt.id.job_id)
    return found or JobStatus(attempt=attempt.id.number)


def _bring_up(history: PlanHistory, status: JobStatus, decision: Decision) -> None:
    """Have the last be the plan of the attempt that trains, or did so last."""
    if not history.plans or history.plans[-1].attempt != status.attempt:
        history.plans.add(
            began_at=status.started_at,
            from_step=status.from_step,
            reason="planned",
            attempt=status.attempt,
        )
    history.plans[-1].decision.CopyFrom(in_brief(decision))
