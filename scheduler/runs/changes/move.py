"""A job that trains goes over to another plan, from a cut that its workers pause at.

The workers of the other plan are started beside those that train. Once they listen, these take a
cut after a step and wait there; then the others begin at it, and those before are stopped. The
tables stay where they are, unless the plan has other units for them: then shards are started on
these, too, and load the cut. Up to the one write that says which processes the job has, it may go
on under the plan before, with the state that these have kept; from then on it can only go on under
the other one, from the cut.
"""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from protos.decision_pb2 import Decision
from protos.naming import kept_with
from protos.node_pb2 import SHARD, STAGE
from protos.scheduler_pb2 import END_CONNECTION_LOST, END_NO_CAPACITY, Cut, JobStatus, Move
from protos.stage_pb2 import PauseRequest, RegroupRequest
from protos.stage_pb2_grpc import StageStub
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import CallError, Interrupted, call
from scheduler.runs.change import Change, Stage, in_short
from scheduler.runs.changes import under_way
from scheduler.runs.changes.regroup import regroup, resume
from scheduler.runs.cleanup import stop_others
from scheduler.runs.failures import JobError, ending_of
from scheduler.runs.launch import (
    begin,
    groups_of,
    launch,
    place_shards,
    shards_of,
    topology_of,
    workers_of,
)
from scheduler.runs.plans import keep_moved, measured
from scheduler.runs.processes import Process
from scheduler.runs.states import State
from scheduler.state.endings import Ending, first_line
from scheduler.state.store import TransitionError

_CALL_S = 20.0
_log = logging.getLogger("heterps.runner")


def advance(attempt: Attempt) -> None:
    """Take what is due a step further: a change, or workers that wait for none.

    Raises:
        JobError: the attempt is over.
        Interrupted: the job is cancelled, or another scheduler has taken over.
    """
    change, follower = attempt.change, attempt.follower
    assert follower is not None
    if change is not None and change.failed:
        give_up(attempt, change.failed)
    elif follower.paused is not None:
        if change is None or change.stage is not Stage.PAUSING:
            resume(attempt)
        else:
            _go_over(attempt, change, follower.paused)
    elif change is not None and change.stage is Stage.WANTED:
        change.stage = Stage.STARTING
        name = f"change {attempt.id.job_id}"
        threading.Thread(target=_start, args=(attempt, change), name=name, daemon=True).start()
    elif change is not None and change.stage is Stage.READY:
        _pause(attempt, change)


def give_up(attempt: Attempt, why: str) -> None:
    """Have the job keep its plan; without effect where no change is under way."""
    change = attempt.change
    if change is None:
        return
    _log.warning("job %s: it keeps its plan: %s", attempt.id.job_id, why)
    move = _move(attempt, change)
    move.failed = why
    under_way.end(attempt, move)
    settle(attempt)


def overtaken(attempt: Attempt) -> None:
    """Tell of a change that was under way when the attempt ended; without effect where none was."""
    with attempt.record.lock:  # whoever asks for one holds it until it is under way, or refused
        change = attempt.change
    with suppress(TransitionError, Interrupted):  # a Redis that lost the job, or is another's
        if change is None:
            taken_over(attempt)  # where the attempt ended before it had come to that
            return
        move = _move(attempt, change)
        move.failed = change.failed or "the attempt ended before it could go over"
        under_way.end(attempt, move)


def taken_over(attempt: Attempt) -> None:
    """Tell of a change that the scheduler before had under way; without effect where none was."""
    found = attempt.record.change
    if found is None:
        return
    move = Move()
    move.CopyFrom(found)
    if not move.failed and not move.seconds:
        move.seconds = max(0.0, time.time() - move.at)
    with suppress(TransitionError):
        under_way.end(attempt, move)


def settle(attempt: Attempt) -> None:
    """Stop the workers of plans that the job does not have, behind its back; safe to repeat.

    Units that the job's own workers and shards do not have are given back.
    """
    attempt.record.hold()
    stop_others(attempt)


def _start(attempt: Attempt, change: Change) -> None:
    """Start the workers of the other plan, and wait until all listen."""
    failed = ""
    try:
        _launch(attempt, change)
    except Interrupted:
        failed = "it ended meanwhile"
    except Exception as error:
        failed = first_line(ending_of(error).text)
        _log.warning("job %s: %s", attempt.id.job_id, error)
    if attempt.change is not change:  # given up meanwhile: what was started late is stopped, too
        if attempt.state is State.RUNNING and not attempt.is_cancelled():
            attempt.record.add_others(change.processes)
            if change.processes:
                stop_others(attempt, change.processes)
        return
    change.failed, change.stage = failed, Stage.READY
    if attempt.follower is not None:
        attempt.follower.wake()


def _launch(attempt: Attempt, change: Change) -> None:
    context, decision = attempt.context, change.decision
    spec = attempt.spec()
    groups, singles, held = groups_of(decision), list[str](), attempt.record.of_workers
    stays = _tables_stay(attempt, decision)
    if not stays and spec is not None:
        more, singles = shards_of(decision, spec.servers.shards, ())
        groups, held = [*groups, *more], [*held, *attempt.record.of_shards]
    units = under_way.reserve(attempt, change, groups, singles, held)
    if units is None or spec is None:
        text = f"the plan needs {in_short(decision)}, and not so many units are free"
        raise JobError(Ending(END_NO_CAPACITY, text, error=text))
    generation = change.generation = attempt.record.launched_generation()
    change.processes = workers_of(attempt.id, decision, units, generation)
    if not stays:
        change.for_shards = [node.node_id for node in units[len(change.processes) :]]
        shards = place_shards(attempt.id, spec, decision, units, (), context.nodes, generation)
        change.processes = [*shards, *change.processes]
    attempt.record.add_others(change.processes)
    before = _shards(attempt) if stays else []
    started = launch(
        attempt.id,
        spec,
        decision,
        [*before, *change.processes],
        context.address,
        context.channels,
        lambda: attempt.is_cancelled() or attempt.change is not change,
        attempt.beginning.place,
        generation,
        attempt.former(),
    )
    change.processes = started[len(before) :]


def _tables_stay(attempt: Attempt, after: Decision) -> bool:
    """Whether the shards are where a plan has them."""
    before = attempt.decision
    if any(shard.standing for shard in _shards(attempt)):
        return True
    kinds = before.workload.ps_type, after.workload.ps_type
    units = before.ps_units, after.ps_units
    return units[0] == units[1] and (kinds[0] == kinds[1] or not units[0])


def _pause(attempt: Attempt, change: Change) -> None:
    """Tell the workers that train to take a cut and wait there."""
    until = change.wanted.until
    if until is not None and time.monotonic() > until:
        give_up(attempt, "its workers were not started in time")
        return
    change.stage = Stage.PAUSING
    try:
        pause(attempt)
    except CallError as error:
        give_up(attempt, str(error))


def pause(attempt: Attempt) -> None:
    """Have the workers take a cut after a step and wait there; the follower hears when they do.

    Raises:
        CallError: they were not told.
        Interrupted: the job is cancelled, or another scheduler has taken over.
    """
    judge = next(p for p in _workers(attempt) if (p.index, p.rank) == (0, 0))
    call(
        StageStub(attempt.context.channels.to(judge.address, attempt.id.token)).Pause,
        PauseRequest(generation=attempt.record.generation),
        what=f"{judge.label} at {judge.address}: pause",
        timeout_s=_CALL_S,
        stop=attempt.is_cancelled,
    )


def _go_over(attempt: Attempt, change: Change, step: int) -> None:
    """All wait after a step; have the workers of the other plan begin there."""
    cut = cut_at(attempt, step)
    if cut is None:
        status = attempt.context.jobs.get(attempt.id.job_id) or JobStatus()
        give_up(attempt, status.cut_error or f"no checkpoint was taken at step {step}")
        resume(attempt)
        return
    assert attempt.follower is not None
    paused, move = attempt.record.generation, _move(attempt, change)
    # The last step had ended when the cut began, which was complete when they were heard to wait.
    began = attempt.follower.paused_at - cut.seconds
    move.at = time.time() - (time.monotonic() - began)
    generation = attempt.record.next_generation(change.generation)
    if (problem := _gather(attempt, change.processes, generation)) is not None:
        give_up(attempt, problem)
        resume(attempt)
        return
    before = _measured(attempt)
    move.measured = before.measured.throughput
    if change.shards:
        attempt.go_over(change.decision, change.processes, move, change.for_shards)
    else:
        attempt.go_over(change.decision, [*_shards(attempt), *change.processes], move)
    topology = topology_of(attempt.id.job_id, attempt.processes)
    topology.generation, topology.line, topology.step = generation, generation, step
    if not change.shards:
        topology.paused = paused
    topology.cut = kept_with(cut.place, attempt.context.address)
    try:
        begin(
            attempt.id, attempt.processes, attempt.context.channels, attempt.is_cancelled, topology
        )
    except CallError as error:
        cause = Ending(END_CONNECTION_LOST, str(error), error=str(error))
        if not attempt.may_recover(cause):
            raise JobError(cause) from None
        regroup(attempt, [], cause)
    else:
        attempt.go_on(cut.samples)
    move.seconds = time.monotonic() - began
    under_way.end(attempt, move)
    settle(attempt)
    keep_moved(attempt, before, move)
    _log.info(
        "job %s: from %s to %s in %.1f s, at step %d",
        *(attempt.id.job_id, move.before, move.after, move.seconds, step),
    )


def _gather(attempt: Attempt, processes: Sequence[Process], generation: int) -> str | None:
    """Bring the workers that were started to the generation that begins; why they cannot be."""
    workers = [process for process in processes if process.role == STAGE]

    def ask(worker: Process) -> None:
        call(
            StageStub(attempt.context.channels.to(worker.address, attempt.id.token)).Regroup,
            RegroupRequest(generation=generation),
            what=f"{worker.label} at {worker.address} ({worker.place}): regroup",
            timeout_s=_CALL_S,
            stop=attempt.is_cancelled,
        )

    try:
        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(ask, workers))
    except CallError as error:
        return str(error)
    return None


def _workers(attempt: Attempt) -> list[Process]:
    return [process for process in attempt.processes if process.role == STAGE]


def _shards(attempt: Attempt) -> list[Process]:
    return [process for process in attempt.processes if process.role == SHARD]


def cut_at(attempt: Attempt, step: int) -> Cut | None:
    """The one that was taken of this attempt after a step, as the job's status has it."""
    status = attempt.context.jobs.get(attempt.id.job_id) or JobStatus()
    found = [c for c in status.cuts if (c.step, c.attempt) == (step, attempt.id.number)]
    return found[0] if found else None


def _measured(attempt: Attempt) -> Decision:
    """The plan that the job has, with what was measured of it."""
    made, follower = Decision(), attempt.follower
    assert follower is not None
    made.CopyFrom(attempt.decision)
    report = follower.last_report()
    if report is not None and report.train_seconds > 0:
        made.measured.CopyFrom(measured(attempt, report))
    return made


def _move(attempt: Attempt, change: Change) -> Move:
    """What is to be told of a change, with what is known by now."""
    follower, made = attempt.follower, Move()
    assert follower is not None
    made.CopyFrom(change.move)
    made.ClearField("failed")
    made.at, made.step = time.time(), follower.paused or attempt.step
    made.measured = _measured(attempt).measured.throughput
    return made
