"""An attempt's thread: prepares it, follows it to its end, cleans up."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from chassis.logs import log_scope
from protos.scheduler_pb2 import END_INTERNAL, END_SCHEDULER_LOST, END_SUCCEEDED
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import CallError, Interrupted
from scheduler.runs.changes.drain import Drain, marked
from scheduler.runs.changes.guard import guard
from scheduler.runs.changes.move import advance, give_up, overtaken, settle, taken_over
from scheduler.runs.changes.regroup import regroup
from scheduler.runs.changes.spread import Spread
from scheduler.runs.changes.watch import watch
from scheduler.runs.cleanup import clean_up
from scheduler.runs.failures import JobError, ending_of
from scheduler.runs.launch import begin
from scheduler.runs.plans import measured
from scheduler.runs.prepare import Preparation
from scheduler.runs.processes import Process
from scheduler.runs.states import State
from scheduler.state.endings import Ending, first_line
from scheduler.state.store import DeposedError, StoreError, TransitionError

_PAUSE_S = 1.0
_log = logging.getLogger("heterps.runner")


def start(attempt: Attempt, may_reserve: Callable[[Attempt], bool] = lambda attempt: True) -> None:
    """Take an attempt from where it is to its end, on a thread of its own.

    Args:
        may_reserve: whether no job of a higher priority waits for units.
    """
    threading.Thread(
        target=_run, args=(attempt, may_reserve), name=f"run {attempt.id.job_id}", daemon=True
    ).start()


def _run(attempt: Attempt, may_reserve: Callable[[Attempt], bool]) -> None:
    with log_scope(job=attempt.id.job_id):
        ending = _ending(attempt, may_reserve)
        try:
            _finish(attempt, ending)
        except Exception:
            _log.exception("job %s: its end is not written", attempt.id.job_id)
            time.sleep(_PAUSE_S)
            attempt.move(State.HANDED_OVER)  # to the dispatcher, which gives it up


def _ending(attempt: Attempt, may_reserve: Callable[[Attempt], bool]) -> Ending:
    """Do all there is to do until it is to be stopped; why."""
    try:
        if attempt.state is State.NEW:
            Preparation(attempt, may_reserve).run()
        elif attempt.state is State.RUNNING:
            _begin_again(attempt)
        if attempt.state is State.RUNNING:
            keepers = Drain(attempt), Spread(attempt)
            while _follow(attempt, keepers):
                pass
            return Ending(END_SUCCEEDED)
    except Interrupted:
        pass
    except Exception as error:
        ending = ending_of(error)
        if ending.reason == END_INTERNAL:
            _log.exception("job %s", attempt.id.job_id)
        return marked(attempt, ending)
    return attempt.ending


def _begin_again(attempt: Attempt) -> None:
    """Give the word once more: the scheduler before may have died while it did."""
    settle(attempt)  # of a change that was under way, which is not gone on with
    taken_over(attempt)
    if attempt.record.is_regrouping:
        text = "the scheduler was restarted while workers were replaced"
        regroup(attempt, [], Ending(END_SCHEDULER_LOST, text, "scheduler", text))
        return
    if attempt.record.generation:
        return
    try:
        begin(attempt.id, attempt.processes, attempt.context.channels, attempt.is_cancelled)
    except CallError as error:  # one that has ended is found by following
        _log.info("job %s: %s", attempt.id.job_id, error)


def _replace(attempt: Attempt, lost: Sequence[Process], cause: Ending) -> None:
    """Have it go on without the workers that were lost, or end for what is to blame."""
    try:
        regroup(attempt, lost, cause)
    except JobError as error:
        follower = attempt.follower
        if error.ending is not cause or follower is None:
            raise
        found = follower.diagnose(attempt.is_cancelled, cause)
        if found.report is None:  # else it was done before
            ending = found.ending or cause
            head, *rest = ending.text.splitlines() or [""]
            head = "; ".join(filter(None, (head, error.besides)))
            raise JobError(replace(ending, text="\n".join([head, *rest]))) from None


def _follow(attempt: Attempt, keepers: Sequence[Drain | Spread]) -> bool:
    """Wait for the end, or do what keeps it going; whether it goes on."""
    decision, follower = attempt.decision, attempt.follower
    assert follower is not None
    with watch(attempt), guard(attempt):
        while True:
            outcome = follower.follow(
                attempt.is_cancelled,
                lambda ending: attempt.may_recover(marked(attempt, ending)),
                lambda: attempt.is_due() or any(one.is_due() for one in keepers),
            )
            if not (outcome.due and any(one.step() for one in keepers)):
                break
    report, ending = outcome.report, outcome.ending
    if outcome.due:
        advance(attempt)
        return True
    if report is None:
        ending = ending or Ending(END_INTERNAL, "it ended without a reason")
        if outcome.lost is None:
            raise JobError(ending)
        ending = marked(attempt, ending)
        give_up(attempt, f"workers died meanwhile: {ending.error or first_line(ending.text)}")
        _replace(attempt, outcome.lost, ending)
        return True
    attempt.add_progress(report)
    attempt.forget_cuts()
    decision.measured.CopyFrom(measured(attempt, report))
    attempt.keep(decision)
    return False


def _finish(attempt: Attempt, ending: Ending) -> None:
    """Stop what runs and write the end, unless another scheduler has taken over."""
    job_id, context = attempt.id.job_id, attempt.context
    written = False
    if not attempt.is_handed_over and context.leadership.confirm():
        if attempt.state is not State.STOPPING:
            attempt.move(State.STOPPING)
        overtaken(attempt)
        try:
            clean_up(attempt, finished=ending.reason == END_SUCCEEDED)
        except Exception:
            _log.exception("job %s: cleaning up", job_id)
        context.nodes.release(job_id)
        context.nodes.size(job_id, {})
        written = _end(attempt, ending)
    attempt.move(State.ENDED if written else State.HANDED_OVER)


def _end(attempt: Attempt, ending: Ending) -> bool:
    """End the job, or put it back into the queue, waiting for a Redis that is away.

    Returns:
        Whether it is written; otherwise that is another scheduler's.
    """
    job_id, jobs = attempt.id.job_id, attempt.context.jobs
    while not attempt.is_handed_over:
        if attempt.is_cancelled() and ending.reason != END_SUCCEEDED:
            ending = attempt.ending  # asked each time: it may have come while Redis was away
        try:
            price = attempt.decision.price_per_hour
            if not jobs.retry(job_id, ending, price, attempt.record.generation):
                jobs.end(job_id, ending)
            return True
        except DeposedError:
            return False
        except StoreError as error:
            _log.warning("job %s: %s; trying on", job_id, error)
            time.sleep(_PAUSE_S)
        except TransitionError as error:  # a Redis that lost its data: nothing to start over from
            _log.error("%s", error)
            jobs.end(job_id, ending)
            return True
    return False
