"""Workers and shards that died are replaced, and the others of the attempt keep their processes.

Everybody gives up the steps under way and tells how many updates its state has. The most that any
has is where all go on: whoever has fewer, or is new, takes the state from another of its stage. Of
a stage whose workers waited for the verdict that others had, each takes the step by that.
Where nobody of a stage has it, as of experts that are split, or a shard is lost with its rows, all
go back to the job's newest cut, or to where it began; nothing of before is applied any more then,
and no state that somebody kept of it counts.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from protos.generations import keeps_state, may_be_replaced
from protos.job_pb2 import JobSpec
from protos.node_pb2 import SHARD, STAGE
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_LOST_NODE,
    END_WORKER_CRASHED,
    JobStatus,
    NodeStatus,
    Recovery,
)
from protos.stage_pb2 import RegroupReply, RegroupRequest
from protos.stage_pb2_grpc import StageStub
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import CallError, Stop, call
from scheduler.runs.changes.go_on import GoOn, Kept, go_back, go_on
from scheduler.runs.changes.shards import answer_of, lost_shards, reserve_homes
from scheduler.runs.cleanup import stop_others
from scheduler.runs.failures import JobError
from scheduler.runs.launch import (
    begin,
    devices_of,
    launch,
    shard_of,
    topology_of,
    worker_of,
)
from scheduler.runs.processes import Process
from scheduler.runs.recoveries import reached_at
from scheduler.runs.sharing import beside
from scheduler.state.endings import Ending, first_line
from scheduler.state.packing import Group

# Of one that was killed as it started, or whose node was: another may start.
_PASSING = (END_LOST_NODE, END_WORKER_CRASHED)
_REGROUP_S = 120.0  # a worker may be in the midst of a long micro-batch
_BEGIN_S = 0.2  # all have just answered: who cannot be reached now is gone, and the rest wait
_ROUNDS = 5  # in which others may be found to be gone, too
_LOOK_S = 1.0  # between looks at the shards that workers may wait for
_log = logging.getLogger("heterps.runner")


@dataclass(frozen=True, slots=True)
class _Replaced:
    """Of an attempt, the lost ones replaced by others that listen.

    Attributes:
        processes: all of them.
        for_shards: node ids, one for each unit that was reserved for shards.
    """

    processes: list[Process]
    for_shards: Sequence[str]


@dataclass(frozen=True, slots=True)
class Instead:
    """Workers that listen already, to be in the place of some that still trained.

    Attributes:
        generation: that they were started for.
        workers: by the id of the one in whose place each is.
    """

    generation: int = 0
    workers: Mapping[str, Process] = field(default_factory=dict)


_NOBODY = Instead()


def regroup(
    attempt: Attempt, lost: Sequence[Process], cause: Ending, instead: Instead = _NOBODY
) -> None:
    """Replace the workers and shards that are lost, and have all go on.

    Args:
        instead: workers that were started for this.

    Raises:
        JobError: that is not possible, with `cause` as its ending; the attempt is over.
        Interrupted: the job is cancelled, or another scheduler has taken over.
    """
    _regroup(attempt, lost, cause, instead)


def resume(attempt: Attempt) -> None:
    """Have all workers go on that wait after a step, for nothing has come of what was to follow.

    Raises:
        JobError, Interrupted: as of `regroup`.
    """
    text = "its workers did not go on after a pause"
    _regroup(attempt, (), Ending(END_CONNECTION_LOST, text, error=text), _NOBODY, paused=True)


def _regroup(
    attempt: Attempt,
    lost: Sequence[Process],
    cause: Ending,
    instead: Instead,
    *,
    paused: bool = False,
) -> None:
    began = time.monotonic()
    at = time.time()
    gone = {process.process_id for process in lost}
    labels: list[str] = []
    kinds: set[str] = set()
    reached, line = attempt.step, attempt.record.line
    spec = attempt.spec()
    if spec is None:
        raise JobError(cause)
    for _ in range(_ROUNDS):
        if attempt.follower is not None and attempt.follower.is_done:
            return  # the leader had the model saved before it was asked
        gone |= {shard.process_id for shard in lost_shards(attempt)}
        left = [process for process in attempt.processes if process.process_id in gone]
        labels += [process.label for process in left]
        kinds |= {process.node.type for process in left}
        generation = attempt.record.next_generation(instead.generation)
        if instead.generation != generation:
            instead = _NOBODY
        found = _one_round(attempt, spec, gone, generation, cause, instead.workers)
        if found is not None:
            break
        if instead.workers:  # they are the attempt's by now, or nobody's, as are their units
            attempt.record.hold()
    else:
        raise JobError(cause)
    if paused and not gone and attempt.record.line == line:
        return
    now = time.monotonic()
    recovery = Recovery(
        at=at,
        lost=list(dict.fromkeys(labels)),
        seconds=now - began,
        stood_s=now - found.since if found.since else 0.0,
        step=found.step,
        attempt=attempt.id.number,
        reason=cause.error or first_line(cause.text),
        reached=found.step,
        price_per_hour=attempt.decision.price_per_hour,
        drained=cause.drained,
    )
    if attempt.record.line != line:
        recovery.back, recovery.reached = True, max(reached, found.step)
        status = attempt.context.jobs.get(attempt.id.job_id) or JobStatus()
        recovery.lost_s = max(0.0, at - reached_at(status, found.step))
    attempt.recovered(recovery, kinds, found.samples)
    _log.warning(
        "job %s: %s replaced in %.1f s; it goes on from step %d",
        attempt.id.job_id,
        ", ".join(labels) or "nobody",
        time.monotonic() - began,
        found.step,
    )


def _one_round(
    attempt: Attempt,
    spec: JobSpec,
    gone: set[str],
    generation: int,
    cause: Ending,
    instead: Mapping[str, Process],
) -> GoOn | None:
    """Try it once; None where more turn out to be gone, who are added to `gone`."""
    stop, channels = attempt.is_cancelled, attempt.context.channels
    survivors = [p for p in attempt.processes if p.role == STAGE and p.process_id not in gone]
    if not survivors or not may_be_replaced(devices_of(attempt.decision)):
        raise JobError(cause)
    shards_gone = any(p.role == SHARD and p.process_id in gone for p in attempt.processes)
    back = shards_gone or not keeps_state(spec)
    pool = ThreadPoolExecutor(max(1, len(survivors)))
    try:
        asked = {
            process.process_id: pool.submit(_ask, attempt, process, generation, back=back)
            for process in survivors
        }
        replaced = _replaced_if_they_start(attempt, spec, gone, generation, cause, instead)
        kept = _kept(attempt, asked, gone)
    finally:
        pool.shutdown(wait=False)
    if replaced is None:
        return None
    attempt.place(replaced.processes, replaced.for_shards)
    if kept is None:
        return None  # those who were just started are asked next time
    stop_others(attempt)
    found = go_on(attempt.processes, kept, len(attempt.decision.stages), attempt.record.line)
    if found is None:
        found = go_back(attempt, spec, cause)
    topology = topology_of(attempt.id.job_id, attempt.processes)
    topology.generation, topology.step, topology.cut = generation, found.step, found.cut
    topology.line = attempt.record.line
    topology.donors.extend(donor.address for donor in found.donors)
    topology.judged.extend(found.judged)
    topology.former.extend(found.former)
    try:
        begin(attempt.id, attempt.processes, channels, stop, topology, _BEGIN_S)
    except CallError as error:
        _log.warning("job %s: %s", attempt.id.job_id, error)
        gone |= _ended(attempt, attempt.processes)
        return None
    attempt.go_on(found.samples)
    return found


def _ask(attempt: Attempt, process: Process, generation: int, *, back: bool) -> Kept:
    stub = StageStub(attempt.context.channels.to(process.address, attempt.id.token))
    reply: RegroupReply = call(
        stub.Regroup,
        RegroupRequest(generation=generation, back=back),
        what=f"{process.label} at {process.address} ({process.place}): regroup",
        timeout_s=_REGROUP_S,
        stop=attempt.is_cancelled,
    )
    return Kept(reply, time.monotonic() - reply.idle_s)


def _kept(
    attempt: Attempt, asked: Mapping[str, "Future[Kept]"], gone: set[str]
) -> dict[str, Kept] | None:
    """What each has kept; None where more turn out to be gone, who are added to `gone`.

    Where a shard is lost meanwhile, workers may wait for it: they are asked again, to go back.
    """
    while wait(asked.values(), _LOOK_S).not_done:
        found = {shard.process_id for shard in lost_shards(attempt)} - gone
        if found:
            gone |= found
            return None
    kept: dict[str, Kept] = {}
    for name, future in asked.items():
        try:
            kept[name] = future.result()
        except CallError as error:
            _log.warning("%s: %s", name, error)
            gone.add(name)
    return kept if len(kept) == len(asked) else None


def _replaced_if_they_start(
    attempt: Attempt,
    spec: JobSpec,
    gone: set[str],
    generation: int,
    cause: Ending,
    instead: Mapping[str, Process],
) -> _Replaced | None:
    """As `_replaced`; None where one was killed as it started, or its node was.

    Raises:
        JobError: there is no unit for one, or it failed by an error of its own.
    """
    try:
        return _replaced(attempt, spec, gone, generation, cause, instead)
    except JobError as error:
        if error.ending is cause or error.ending.reason not in _PASSING:
            raise
        _log.warning("job %s: %s", attempt.id.job_id, error)
        return None


def _replaced(
    attempt: Attempt,
    spec: JobSpec,
    gone: set[str],
    generation: int,
    cause: Ending,
    instead: Mapping[str, Process],
) -> _Replaced:
    """All processes, the lost ones replaced by others that listen.

    Where no unit is free for a worker, it shares one with another of the job.

    Raises:
        JobError: there is no unit for one, or it did not start.
    """
    nodes, job_id = attempt.context.nodes, attempt.id.job_id
    lost = [process for process in attempt.processes if process.process_id in gone]
    shards = [process for process in lost if process.role == SHARD]
    usable = {shard.node.node_id: home_now(attempt, shard.node.node_id) for shard in shards}
    placed_shards = reserve_homes(attempt, shards, usable)
    if placed_shards is None:
        raise JobError(cause)
    news = {
        name: shard_of(attempt.id, index, placed_shards.nodes[name], generation)
        for name, index in ((shard.process_id, shard.index) for shard in shards)
    }
    taken = [*placed_shards.units]  # nodes of units in the place of others
    silent = {node_id for node_id, node in usable.items() if node is None}

    def usable_now(node_id: str) -> NodeStatus | None:
        return None if node_id in silent else home_now(attempt, node_id)

    try:
        for process in lost:
            if process.role == SHARD:
                continue
            if process.process_id in instead:
                news[process.process_id] = instead[process.process_id]
                continue
            node_id = process.node.node_id
            shares = process.shares
            while (home := usable_now(node_id)) is None:
                silent.add(node_id)
                if node_id in taken:
                    taken.remove(node_id)
                    nodes.give_back(job_id, [node_id])
                placed = nodes.reserve(job_id, [Group(process.node.type, 1)], avoid=silent)
                if placed is None:
                    left = [p for p in attempt.processes if p.process_id not in gone]
                    others = [*left, *news.values()]
                    home, why = beside(process, others, attempt.decision, usable_now)
                    if home is None:
                        raise JobError(cause, why)
                    shares = True
                    break
                shares, node_id = False, placed[0].node_id
                taken.append(node_id)
            news[process.process_id] = worker_of(
                attempt.id, process.index, process.rank, home, generation, shares=shares
            )
        attempt.record.add_others([one for one in news.values() if not one.address])
        processes = launched(attempt, spec, news, generation, attempt.is_cancelled)
        return _Replaced(processes, placed_shards.units)
    except BaseException:
        nodes.give_back(job_id, taken)
        raise


def home_now(attempt: Attempt, node_id: str) -> NodeStatus | None:
    """A node as it is now; None where it takes nothing, or does not answer.

    Its lease may hold for a while after its end.
    """
    status = attempt.context.nodes.get(node_id)
    if status is None or status.draining or answer_of(attempt, status) is None:
        return None
    return status


def launched(
    attempt: Attempt, spec: JobSpec, news: Mapping[str, Process], generation: int, stop: Stop
) -> list[Process]:
    """All processes, with new ones in the place of some; who listens already stays as it is.

    Raises:
        JobError: one did not start.
        Interrupted: `stop` said so.
    """
    context = attempt.context
    return launch(
        attempt.id,
        spec,
        attempt.decision,
        [news.get(process.process_id, process) for process in attempt.processes],
        context.address,
        context.channels,
        stop,
        attempt.beginning.place,
        generation,
        attempt.former(),
    )


def _ended(attempt: Attempt, processes: Sequence[Process]) -> set[str]:
    """Those whose node is gone, or tells that they ended."""
    nodes = attempt.context.nodes
    return {
        process.process_id
        for process in processes
        if process.role == STAGE and not process.runs_on(nodes.get(process.node.node_id))
    }
