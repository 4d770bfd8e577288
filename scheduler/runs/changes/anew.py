"""A job that trains, planned anew: with what was measured, on the nodes that are there now."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from protos.decision_pb2 import Decision, ResourceType
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import JobStatus, NodeStatus
from scheduler.replanning.measure import Measurement
from scheduler.runs.attempt import Attempt
from scheduler.runs.offer import make_offer
from scheduler.state.nodes import Nodes

if TYPE_CHECKING:
    from scheduler.planning.elastic import Bounds
    from scheduler.replanning.moves import Past
    from scheduler.replanning.proposal import Moving, Proposal

BY_ITSELF = ("replanned", "joined")  # reasons of moves that nobody asked for


def on_nodes_now(attempt: Attempt, spec: JobSpec) -> Decision:
    """The decision of a job that trains, offered what no other job holds now.

    Types of its own that are not there any more are excluded. One that was not there before is
    offered with the costs that the job gives; without these it stays unknown.

    Raises:
        OfferError: there is nothing.
    """
    return offered_now(attempt.decision, spec, attempt.context.nodes, attempt.id.job_id)


def offered_now(decision: Decision, spec: JobSpec, nodes: Nodes, owner: str) -> Decision:
    """As `on_nodes_now`, of the decision of a job that holds its units as `owner`."""
    live = nodes.placeable()
    free = nodes.available(owner)
    # Of a type that it did not know a unit is one of a node's: it may reserve some before it has a
    # plan with them.
    threads = {kind.name: 1 for kind in spec.schedule.offered.types}
    threads |= {kind.name: kind.node_units or 1 for kind in decision.resources.types}
    offer = make_offer(spec, live, threads)
    found = Decision()
    found.CopyFrom(decision)
    known = {kind.name: kind for kind in decision.resources.types}
    del found.resources.types[:]
    for kind in offer.resources.types:
        if kind.name in known:  # with the recovery times that were measured
            kind.recovery_s = known[kind.name].recovery_s
            kind.restart_s = known[kind.name].restart_s
        kind.limit = max(1, min(kind.limit, free.get(kind.name, 0)))
        found.resources.types.append(kind)
    there = {kind.name for kind in found.resources.types}
    gone = [kind for kind in decision.resources.types if kind.name not in there]
    found.resources.types.extend(gone)
    _add_costs(found, spec, offer.resources.types)
    named = {kind.name for kind in found.resources.types}
    shut = {kind.name for kind in gone} | {name for name in there if not free.get(name, 0)}
    own = set(decision.assignment) & there
    del found.excluded[:]
    found.excluded.extend(sorted((named & set(spec.schedule.exclude)) | (shut - own)))
    return found


def _add_costs(found: Decision, spec: JobSpec, offered: Iterable[ResourceType]) -> None:
    """Costs on types that the decision was made without, where the job gives them."""
    given = {layer.name: layer for layer in spec.schedule.given.layers}
    told = spec.schedule.given.threads
    there = {kind.name for kind in offered if told.get(kind.name, 1) == (kind.threads or 1)}
    for layer in found.workload.layers:
        if layer.name not in given:
            continue
        for name, cost in given[layer.name].cost.items():
            if name in there and name not in layer.cost:
                layer.cost[name].CopyFrom(cost)
                if name in told:
                    found.workload.threads[name] = told[name]


def bounds_of(spec: JobSpec) -> "Bounds":
    """How many units a job may have."""
    from scheduler.planning.elastic import Bounds

    return Bounds(spec.schedule.elastic.min, spec.schedule.elastic.max)


def past_of(status: JobStatus, spec: JobSpec) -> "Past":
    """What a job's next move must heed of those before, and its deadline."""
    from scheduler.replanning.moves import Past

    now = time.time()
    own = [move for move in status.moves if move.reason in BY_ITSELF]
    made = sum(not move.failed for move in own)
    past = Past()
    if own:
        past = Past(max(1, made), now - own[-1].at - own[-1].seconds)
    hours = [spec.deadline_hours, spec.schedule.finish_by_hours]
    ends = [status.began_at + one * 3600 for one in hours if one]
    return Past(past.moves, past.since_s, min(ends) - now) if ends else past


def moving_of(status: JobStatus, started_s: float) -> "Moving":
    """What a move is expected to take, by the job's moves and recoveries before.

    Args:
        started_s: seconds that its processes took to start.
    """
    from scheduler.replanning.proposal import Moving

    before = [move.seconds for move in status.moves if not move.failed]
    before += [recovery.seconds for recovery in status.recoveries]
    return Moving.as_before(before, started_s)


def propose_now(
    attempt: Attempt, spec: JobSpec, measurement: Measurement, *, offered: Decision | None = None
) -> "Proposal | None":
    """Another plan for what a job has still to train; None where nothing is.

    Args:
        offered: its decision on what is there now, for a move, which is made with caution; by
            default its own, for what is most likely.

    Raises:
        InputError: it cannot be planned.
    """
    # These bring NumPy: only when they are needed.
    from scheduler.decision import record
    from scheduler.replanning.replan import propose

    decision = offered or attempt.decision
    status = attempt.context.jobs.get(attempt.id.job_id)
    left = left_of(status, decision) if status is not None else 0.0
    if status is None or left <= 0:
        return None
    moving = moving_of(status, attempt.started_s)
    plan = record.Decision.from_message(decision)
    return propose(
        plan,
        measurement,
        left,
        moving=moving,
        bounds=bounds_of(spec),
        cautious=offered is not None,
    )


def left_of(status: JobStatus, decision: Decision) -> float:
    """Samples that a job has still to train.

    By its steps, once it has made some: a workload may be of another number of samples.
    """
    if status.step and status.samples and status.total_steps:
        return status.samples / status.step * max(0, int(status.total_steps) - int(status.step))
    return max(0.0, decision.workload.samples - status.samples)


def for_job(rest: Decision, before: Decision) -> Decision:
    """A plan for the rest of a run, as a decision of the job in the place of the one before.

    Its costs are for all samples, as those of jobs are. Its floor is the job's: a plan may be made
    for less while the running one misses that within noise, and the next would be for less again.
    """
    found = Decision()
    found.CopyFrom(rest)
    factor = before.workload.samples / rest.workload.samples
    found.workload.samples = before.workload.samples
    found.cost, found.lower_bound = found.cost * factor, found.lower_bound * factor
    for alternative in found.alternatives:
        alternative.cost *= factor
    for point in found.pareto:
        point.cost *= factor
    found.min_throughput = before.min_throughput
    found.finish_by = before.finish_by
    return found


class Joins:
    """Nodes that came since a job was last planned."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._known = self._ids()

    def seen(self) -> bool:
        """Whether there are some, who count as known from then on."""
        ids = self._ids()
        new, self._known = ids - self._known, ids
        return bool(new)

    def _ids(self) -> set[tuple[str, str]]:
        return {_who(node) for node in self._nodes.placeable()}


def _who(node: NodeStatus) -> tuple[str, str]:
    return node.node_id, node.address
