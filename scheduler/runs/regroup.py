"""Workers that died are replaced, and the others of the attempt keep their processes.

Everybody gives up the steps under way and tells how many updates its state has. The most that any
has is where all go on: whoever has fewer, or is new, takes the state from another of its stage.
Where nobody of a stage has it, the attempt cannot go on.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from protos.job_pb2 import JobSpec
from protos.node_pb2 import STAGE, NodeStatusRequest
from protos.scheduler_pb2 import END_LOST_NODE, END_WORKER_CRASHED, NodeStatus, Recovery
from protos.stage_pb2 import Notice, RegroupReply, RegroupRequest
from protos.stage_pb2_grpc import StageStub
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import CallError, call
from scheduler.runs.failures import JobError
from scheduler.runs.launch import begin, launch, replacement_of, topology_of
from scheduler.runs.processes import Process
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
        donors: by stage, the process that has it; empty: all begin as they were launched.
        judged: verdicts on the last steps before.
        former: by stage, the newest generation that any of its workers trained in.
    """

    step: int
    donors: tuple[Process, ...] = ()
    judged: tuple[Notice, ...] = ()
    former: tuple[int, ...] = ()


def regroup(attempt: Attempt, lost: Sequence[Process], cause: Ending) -> None:
    """Replace the workers that are lost, and have all go on.

    Raises:
        JobError: that is not possible, with `cause` as its ending; the attempt is over.
        Interrupted: the job is cancelled, or another scheduler has taken over.
    """
    began = time.monotonic()
    at = time.time()
    gone = {process.process_id for process in lost}
    labels = [process.label for process in lost]
    for _ in range(_ROUNDS):
        generation = attempt.next_generation()
        found = _one_round(attempt, gone, generation, cause)
        if found is not None:
            break
        labels += [p.label for p in attempt.processes if p.process_id in gone]
    else:
        raise JobError(cause)
    attempt.recovered(
        Recovery(
            at=at,
            lost=list(dict.fromkeys(labels)),
            seconds=time.monotonic() - began,
            step=found.step,
            attempt=attempt.id.number,
            reason=cause.error or first_line(cause.text),
        )
    )
    _log.warning(
        "job %s: %s replaced in %.1f s; it goes on from step %d",
        attempt.id.job_id,
        ", ".join(labels) or "nobody",
        time.monotonic() - began,
        found.step,
    )


def _one_round(attempt: Attempt, gone: set[str], generation: int, cause: Ending) -> GoOn | None:
    """Try it once; None where more turn out to be gone, who are added to `gone`."""
    stop, channels = attempt.is_cancelled, attempt.context.channels
    survivors = [p for p in attempt.processes if p.role == STAGE and p.process_id not in gone]
    if len({process.index for process in survivors}) < len(attempt.decision.stages):
        raise JobError(cause)
    with ThreadPoolExecutor(max(1, len(survivors))) as pool:
        asked = {
            process.process_id: pool.submit(_ask, attempt, process, generation)
            for process in survivors
        }
        replaced = _replaced_if_they_start(attempt, gone, generation, cause)
        states = {name: _told(future, name, gone) for name, future in asked.items()}
    if replaced is None:
        return None
    if any(state is None for state in states.values()):
        attempt.place(replaced)  # those who were just started are asked next time
        return None
    kept = {name: state for name, state in states.items() if state is not None}
    found = _go_on(replaced, kept, len(attempt.decision.stages), attempt.beginning.step)
    if found is None:
        raise JobError(cause)
    attempt.place(replaced)
    topology = topology_of(attempt.id.job_id, replaced)
    topology.generation, topology.step = generation, found.step
    topology.donors.extend(donor.address for donor in found.donors)
    topology.judged.extend(found.judged)
    topology.former.extend(found.former)
    try:
        begin(attempt.id, replaced, channels, stop, topology)
    except CallError as error:
        _log.warning("job %s: %s", attempt.id.job_id, error)
        gone |= _ended(attempt, replaced)
        return None
    attempt.go_on()
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
    attempt: Attempt, gone: set[str], generation: int, cause: Ending
) -> list[Process] | None:
    """As `_replaced`; None where one was killed as it started, or its node was.

    Raises:
        JobError: there is no unit for one, or it failed by an error of its own.
    """
    try:
        return _replaced(attempt, gone, generation, cause)
    except JobError as error:
        if error.ending is cause or error.ending.reason not in _PASSING:
            raise
        _log.warning("job %s: %s", attempt.id.job_id, error)
        return None


def _replaced(attempt: Attempt, gone: set[str], generation: int, cause: Ending) -> list[Process]:
    """All processes, the lost ones replaced by others that listen.

    Raises:
        JobError: there is no unit for one, or it did not start.
    """
    nodes, job_id = attempt.context.nodes, attempt.id.job_id
    spec = attempt.persist(lambda: attempt.context.store.spec(job_id))
    if spec is None:
        raise JobError(cause)
    news: dict[str, Process] = {}
    moved: list[tuple[str, str]] = []  # from which node to which
    try:
        for process in attempt.processes:
            if process.process_id not in gone:
                continue
            home = _home(attempt, process.node.node_id)
            if home is None:
                placed = nodes.reserve(job_id, [Group(process.node.type, 1)])
                if placed is None:
                    raise JobError(cause)
                (home,) = placed
                moved.append((process.node.node_id, home.node_id))
            news[process.process_id] = replacement_of(process, home, generation)
        replaced = _launched(attempt, spec, news, generation)
    except BaseException:
        nodes.give_back(job_id, [new for _, new in moved])
        raise
    for old, new in moved:
        attempt.move_unit(old, new)
    return replaced


def _home(attempt: Attempt, node_id: str) -> NodeStatus | None:
    """A node as it is now; None where it does not answer, though its lease may hold for a while."""
    context = attempt.context
    status = context.nodes.get(node_id)
    if status is None:
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


def _go_on(
    processes: Sequence[Process], states: dict[str, RegroupReply], stages: int, first: int
) -> GoOn | None:
    """Where all can go on; None where nobody of a stage has the state.

    Args:
        processes: of the new generation.
        states: by process, of those of the one before; some may not have begun.
        first: the step that the attempt began with.
    """
    workers = {p.process_id: p for p in processes if p.role == STAGE}
    former = [0] * stages
    for name, state in states.items():
        stage = workers[name].index
        former[stage] = max(former[stage], state.trained)
    kept = {name: state for name, state in states.items() if state.has_state}
    step = max((state.step for state in kept.values()), default=0)
    having = [workers[name] for name, state in kept.items() if state.step == step]
    donors = {worker.index: worker for worker in having}
    if len(donors) < stages:  # as they were launched, where nobody has taken a step
        return GoOn(0, former=tuple(former)) if step <= first else None
    judged: dict[tuple[int, int], Notice] = {}
    for state in kept.values():
        judged |= {(n.generation, n.step): n for n in state.judged if n.step < step}
    return GoOn(
        step,
        tuple(donor for _, donor in sorted(donors.items())),
        tuple(notice for _, notice in sorted(judged.items())),
        tuple(former),
    )
