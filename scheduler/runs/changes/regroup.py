"""Workers that died are replaced, and the others of the attempt keep their processes.

Everybody gives up the steps under way and tells how many updates its state has. The most that any
has is where all go on: whoever has fewer, or is new, takes the state from another of its stage. Of
a stage whose workers waited for the verdict that others had, each takes the step by that.
Where nobody of a stage has it, all go back to the job's newest cut, or to where it began; nothing
of before is applied any more then, and no state that somebody kept of it counts.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from protos.generations import may_regroup
from protos.job_pb2 import JobSpec
from protos.node_pb2 import STAGE, NodeStatusRequest
from protos.scheduler_pb2 import (
    END_CONNECTION_LOST,
    END_LOST_NODE,
    END_WORKER_CRASHED,
    JobStatus,
    NodeStatus,
    Recovery,
)
from protos.stage_pb2 import Notice, RegroupReply, RegroupRequest
from protos.stage_pb2_grpc import StageStub
from scheduler.runs.attempt import Attempt
from scheduler.runs.beginning import beginning_of
from scheduler.runs.calls import CallError, call
from scheduler.runs.cleanup import stop_others
from scheduler.runs.failures import JobError
from scheduler.runs.launch import (
    begin,
    devices_of,
    drop_tables,
    launch,
    topology_of,
    worker_of,
)
from scheduler.runs.processes import Process
from scheduler.runs.recoveries import reached_at
from scheduler.state.endings import Ending, first_line
from scheduler.state.packing import Group

_STATUS_S = 2.0
# Of one that was killed as it started, or whose node was: another may start.
_PASSING = (END_LOST_NODE, END_WORKER_CRASHED)
_REGROUP_S = 120.0  # a worker may be in the midst of a long micro-batch
_ROUNDS = 5  # in which others may be found to be gone, too
_log = logging.getLogger("heterps.runner")


@dataclass(frozen=True, slots=True)
class GoOn:
    """Where the workers go on from.

    Attributes:
        step: updates in the state.
        samples: trained until then.
        donors: by stage, the process that has it; empty: all go back.
        judged: verdicts on the last steps before.
        former: by stage, the newest generation that any of its workers trained in.
        cut: folder or URL of the one that all go back to; empty: the first step.
    """

    step: int
    samples: int
    donors: tuple[Process, ...] = ()
    judged: tuple[Notice, ...] = ()
    former: tuple[int, ...] = ()
    cut: str = ""


def regroup(
    attempt: Attempt,
    lost: Sequence[Process],
    cause: Ending,
    homes: Mapping[str, NodeStatus] | None = None,
) -> None:
    """Replace the workers that are lost, and have all go on.

    Args:
        homes: by process, the node of a unit that was reserved for the one in its place.

    Raises:
        JobError: that is not possible, with `cause` as its ending; the attempt is over.
        Interrupted: the job is cancelled, or another scheduler has taken over.
    """
    _regroup(attempt, lost, cause, homes or {})


def resume(attempt: Attempt) -> None:
    """Have all workers go on that wait after a step, for nothing has come of what was to follow.

    Raises:
        JobError, Interrupted: as of `regroup`.
    """
    text = "its workers did not go on after a pause"
    _regroup(attempt, (), Ending(END_CONNECTION_LOST, text, error=text), {}, paused=True)


def _regroup(
    attempt: Attempt,
    lost: Sequence[Process],
    cause: Ending,
    homes: Mapping[str, NodeStatus],
    *,
    paused: bool = False,
) -> None:
    began = time.monotonic()
    at = time.time()
    gone = {process.process_id for process in lost}
    labels = [process.label for process in lost]
    kinds = {process.node.type for process in lost}
    reached, line = attempt.step, attempt.record.line
    spec = attempt.spec()
    if spec is None:
        raise JobError(cause)
    for _ in range(_ROUNDS):
        if attempt.follower is not None and attempt.follower.is_done:
            return  # the leader had the model saved before it was asked
        generation = attempt.record.next_generation()
        found = _one_round(attempt, spec, gone, generation, cause, homes)
        if found is not None:
            break
        labels += [p.label for p in attempt.processes if p.process_id in gone]
        kinds |= {p.node.type for p in attempt.processes if p.process_id in gone}
    else:
        raise JobError(cause)
    if paused and not gone and attempt.record.line == line:
        return
    recovery = Recovery(
        at=at,
        lost=list(dict.fromkeys(labels)),
        seconds=time.monotonic() - began,
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
    homes: Mapping[str, NodeStatus],
) -> GoOn | None:
    """Try it once; None where more turn out to be gone, who are added to `gone`."""
    stop, channels = attempt.is_cancelled, attempt.context.channels
    survivors = [p for p in attempt.processes if p.role == STAGE and p.process_id not in gone]
    if not survivors or not may_regroup(spec, devices_of(attempt.decision)):
        raise JobError(cause)
    with ThreadPoolExecutor(max(1, len(survivors))) as pool:
        asked = {
            process.process_id: pool.submit(_ask, attempt, process, generation)
            for process in survivors
        }
        replaced = _replaced_if_they_start(attempt, spec, gone, generation, cause, homes)
        states = {name: _told(future, name, gone) for name, future in asked.items()}
    if replaced is None:
        return None
    if any(state is None for state in states.values()):
        attempt.place(replaced)  # those who were just started are asked next time
        return None
    kept = {name: state for name, state in states.items() if state is not None}
    attempt.place(replaced)
    stop_others(attempt)
    found = _go_on(replaced, kept, len(attempt.decision.stages), attempt.record.line)
    if found is None:
        found = _go_back(attempt, spec, cause)
    topology = topology_of(attempt.id.job_id, replaced)
    topology.generation, topology.step, topology.cut = generation, found.step, found.cut
    topology.line = attempt.record.line
    topology.donors.extend(donor.address for donor in found.donors)
    topology.judged.extend(found.judged)
    topology.former.extend(found.former)
    try:
        begin(attempt.id, replaced, channels, stop, topology)
    except CallError as error:
        _log.warning("job %s: %s", attempt.id.job_id, error)
        gone |= _ended(attempt, replaced)
        return None
    attempt.go_on(found.samples)
    return found


def _ask(attempt: Attempt, process: Process, generation: int) -> RegroupReply:
    stub = StageStub(attempt.context.channels.to(process.address, attempt.id.token))
    reply: RegroupReply = call(
        stub.Regroup,
        RegroupRequest(generation=generation),
        what=f"{process.label} at {process.address} ({process.place}): regroup",
        timeout_s=_REGROUP_S,
        stop=attempt.is_cancelled,
    )
    return reply


def _told(future: "Future[RegroupReply]", name: str, gone: set[str]) -> RegroupReply | None:
    try:
        return future.result()
    except CallError as error:
        _log.warning("%s: %s", name, error)
        gone.add(name)
        return None


def _replaced_if_they_start(
    attempt: Attempt,
    spec: JobSpec,
    gone: set[str],
    generation: int,
    cause: Ending,
    homes: Mapping[str, NodeStatus],
) -> list[Process] | None:
    """As `_replaced`; None where one was killed as it started, or its node was.

    Raises:
        JobError: there is no unit for one, or it failed by an error of its own.
    """
    try:
        return _replaced(attempt, spec, gone, generation, cause, homes)
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
    homes: Mapping[str, NodeStatus],
) -> list[Process]:
    """All processes, the lost ones replaced by others that listen.

    Raises:
        JobError: there is no unit for one, or it did not start.
    """
    nodes, job_id = attempt.context.nodes, attempt.id.job_id
    news: dict[str, Process] = {}
    taken: list[str] = []  # nodes of units in the place of others
    silent: set[str] = set()  # nodes
    try:
        for process in attempt.processes:
            if process.process_id not in gone:
                continue
            node_id = homes.get(process.process_id, process.node).node_id
            while node_id in silent or (home := _home(attempt, node_id)) is None:
                silent.add(node_id)
                if node_id in taken:
                    taken.remove(node_id)
                    nodes.give_back(job_id, [node_id])
                placed = nodes.reserve(job_id, [Group(process.node.type, 1)], avoid=silent)
                if placed is None:
                    raise JobError(cause)
                node_id = placed[0].node_id
                taken.append(node_id)
            news[process.process_id] = worker_of(
                attempt.id, process.index, process.rank, home, generation
            )
        attempt.record.add_others([*news.values()])
        return _launched(attempt, spec, news, generation)
    except BaseException:
        nodes.give_back(job_id, taken)
        raise


def _home(attempt: Attempt, node_id: str) -> NodeStatus | None:
    """A node as it is now; None where it takes nothing, or does not answer.

    Its lease may hold for a while after its end.
    """
    context = attempt.context
    status = context.nodes.get(node_id)
    if status is None or status.draining:
        return None
    try:
        call(
            context.channels.node(status.address).Status,
            NodeStatusRequest(),
            what=f"node {node_id} at {status.address}: status",
            timeout_s=_STATUS_S,
            stop=attempt.is_cancelled,
        )
    except CallError:
        return None
    return status


def _launched(
    attempt: Attempt, spec: JobSpec, news: Mapping[str, Process], generation: int
) -> list[Process]:
    """All processes, with new ones in the place of some that are gone.

    Raises:
        JobError: one did not start.
    """
    context = attempt.context
    return launch(
        attempt.id,
        spec,
        attempt.decision,
        [news.get(process.process_id, process) for process in attempt.processes],
        context.address,
        context.channels,
        attempt.is_cancelled,
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


def _go_back(attempt: Attempt, spec: JobSpec, cause: Ending) -> GoOn:
    """Where all begin anew: at the newest cut, else at the first step, without tables.

    Raises:
        JobError: nobody of this attempt can begin there.
    """
    context = attempt.context
    status = context.jobs.get(attempt.id.job_id)
    if status is None:
        raise JobError(cause)
    beginning = beginning_of(status, spec, context.address)
    attempt.record.begin_line()
    if not beginning.place:
        # Those that were launched to begin at a cut have not read what the job itself begins with.
        shards = [address for _, address in attempt.shards()]
        if attempt.record.resumed or drop_tables(attempt.id.job_id, shards, attempt.id.token):
            raise JobError(cause)
    return GoOn(beginning.step, beginning.samples, cut=beginning.place)


def _go_on(
    processes: Sequence[Process], states: dict[str, RegroupReply], stages: int, line: int
) -> GoOn | None:
    """Where all can go on; None where nobody of a stage has the state.

    Args:
        processes: of the new generation.
        states: by process, of those of the one before; some may not have begun.
        line: that a state must be of.
    """
    workers = {p.process_id: p for p in processes if p.role == STAGE}
    former = [0] * stages
    for name, state in states.items():
        stage = workers[name].index
        former[stage] = max(former[stage], state.trained)
    kept = {name: state for name, state in states.items() if state.has_state and state.line == line}
    step = max((state.step for state in kept.values()), default=0)
    judged: dict[tuple[int, int], Notice] = {}
    for state in kept.values():
        judged |= {(n.generation, n.step): n for n in state.judged if n.step < step}
    decided = [
        workers[name]
        for name, state in kept.items()
        if state.in_doubt and state.step + 1 == step and (state.trained, state.step) in judged
    ]
    having = [workers[name] for name, state in kept.items() if state.step == step]
    donors = {worker.index: worker for worker in (*decided, *having)}
    if len(donors) < stages:
        return None
    return GoOn(
        step,
        next(state.samples for state in kept.values() if state.step == step),
        tuple(donor for _, donor in sorted(donors.items())),
        tuple(notice for _, notice in sorted(judged.items())),
        tuple(former),
    )
