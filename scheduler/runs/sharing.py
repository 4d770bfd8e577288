"""Workers of a job that share a unit, as none was free when they were replaced.

Such a worker is beside one that has the unit, and the job pays for that one alone. It takes as
long for a sample as ever, but only while the other does not compute: each unit takes the seconds of
all that are on it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.decision_pb2 import Decision
from protos.node_pb2 import STAGE
from protos.scheduler_pb2 import JobStatus, NodeStatus, Share
from scheduler.runs.processes import Process
from scheduler.state.packing import host_of


@dataclass(frozen=True, slots=True)
class Home:
    """Where a worker is to be started.

    Attributes:
        node: as it is now.
        shared: there is no unit for it: it shares one with another worker.
    """

    node: NodeStatus
    shared: bool = False


def sharing(processes: Sequence[Process]) -> list[Process]:
    """Those that have no unit: where nobody is left on a node that has one, one of them has it."""
    found: list[Process] = []
    having = {p.node.node_id for p in processes if p.role == STAGE and not p.shares}
    for process in processes:
        if process.role != STAGE or not process.shares:
            continue
        if process.node.node_id in having:
            found.append(process)
        having.add(process.node.node_id)
    return found


def units_of(processes: Sequence[Process]) -> list[str]:
    """Node ids, one for each unit that workers have."""
    without = {process.process_id for process in sharing(processes)}
    return [p.node.node_id for p in processes if p.role == STAGE and p.process_id not in without]


def pace(processes: Sequence[Process], decision: Decision) -> float:
    """Samples/s that a plan is predicted to come to, with those of its workers that share units.

    Where steps do not overlap, what a stage takes longer is put to the time of all; else the
    slowest unit counts.
    """
    found = sharing(processes)
    if not found or not decision.throughput:
        return decision.throughput
    loads = _loads(processes, decision)
    if decision.HasField("staleness") and not decision.staleness:
        whole_s = 1 / decision.throughput
        apart = (loads[p.node.node_id] - _sample_s(p, decision) for p in found)
        return 1 / (whole_s + max(0.0, *apart))
    return min(decision.throughput, 1 / max(loads.values()))


def beside(
    worker: Process,
    others: Sequence[Process],
    decision: Decision,
    usable: Callable[[str], NodeStatus | None],
) -> tuple[NodeStatus | None, str]:
    """The node of another worker of the job whose unit one can share; None, with why there is none.

    Where it makes the job slowest the least, then with its own stage, then on its own host.

    Args:
        others: all that go on, and those that are placed.
        usable: a node as it is now; None where nothing can be started there.
    """
    workers = [p for p in others if p.role == STAGE and p.node.type == worker.node.type]
    nodes = {p.node.node_id: p.node for p in workers}
    loads = _loads(workers, decision)

    def order(node_id: str) -> tuple[float, bool, bool, str]:
        own = any(p.index == worker.index for p in workers if p.node.node_id == node_id)
        far = host_of(nodes[node_id]) != host_of(worker.node)
        return loads[node_id], not own, far, node_id

    why = f"no unit of {worker.node.type} is free, nor a worker of the job left on one"
    for node_id in sorted(nodes, key=order):
        full = _overfull(worker, node_id, workers, decision)
        if full:
            why = f"no unit of {worker.node.type} is free, and {full}"
        elif (node := usable(node_id)) is not None:
            return node, ""
    return None, why


def note(
    status: JobStatus, processes: Sequence[Process], decision: Decision, attempt: int, now: float
) -> None:
    """Tell a job's owner of units that are shared, and of those that are not any more."""
    prices = {kind.name: kind.price_per_hour for kind in decision.resources.types}
    found = {(_name(p), p.node.node_id): p for p in sharing(processes)}
    throughput = pace(processes, decision)
    for one in status.shares:
        if one.until:
            continue
        if one.attempt == attempt and found.pop((one.process, one.node), None) is not None:
            one.throughput = throughput
        else:
            one.until = now
    for (name, node_id), process in found.items():
        status.shares.append(
            Share(
                process=name,
                node=node_id,
                at=now,
                attempt=attempt,
                price_per_hour=prices.get(process.node.type, 0.0),
                throughput=throughput,
            )
        )


def _name(worker: Process) -> str:
    """For people; the same in all generations."""
    return f"stage {worker.index} worker {worker.rank}"


def _sample_s(worker: Process, decision: Decision) -> float:
    """Seconds a sample, over all workers of its stage, for which a worker has its unit busy."""
    stage = decision.stages[worker.index]
    return max(stage.compute_s, stage.transfer_s)


def _loads(processes: Sequence[Process], decision: Decision) -> dict[str, float]:
    """Seconds a sample that a unit of each node is busy for."""
    units = Counter(units_of(processes))
    busy: Counter[str] = Counter()
    for process in processes:
        if process.role == STAGE:
            busy[process.node.node_id] += _sample_s(process, decision)  # type: ignore[assignment]
    return {node_id: seconds / units[node_id] for node_id, seconds in busy.items()}


def _overfull(worker: Process, node_id: str, workers: Sequence[Process], decision: Decision) -> str:
    """Why the units that the job has on a node do not hold one more worker; empty: they do."""
    here = [process for process in workers if process.node.node_id == node_id]
    kinds = {kind.name: kind.memory_bytes for kind in decision.resources.types}
    room = kinds.get(worker.node.type, 0.0) * units_of(workers).count(node_id)
    needed = sum(decision.stages[one.index].memory_bytes for one in (*here, worker))
    if needed <= room:
        return ""
    names = " and ".join(_name(one) for one in (*here, worker))
    return f"{names} need {needed:.3g} bytes, node {node_id} has {room:.3g} for them"
