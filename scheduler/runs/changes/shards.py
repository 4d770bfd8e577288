"""Shards of a job's own that are lost: which they are, and where others begin in their place.

A shard's rows are gone with the disk of its node, so that all go back to the newest cut with it. It
begins anew on its node, if that lives, with files of its own; else on as many units as it had; and
where it had none, on any node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from protos.node_pb2 import SHARD, NodeStatusRequest
from protos.scheduler_pb2 import NodeStatus
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import CallError, call
from scheduler.runs.launch import any_home, split_units
from scheduler.runs.processes import Process
from scheduler.state.packing import Group

_STATUS_S = 2.0


@dataclass(frozen=True, slots=True)
class Homes:
    """Where shards begin in the place of lost ones.

    Attributes:
        nodes: by the id of the one that is lost.
        units: node ids, one for each unit that was reserved for them.
    """

    nodes: Mapping[str, NodeStatus]
    units: Sequence[str]


def lost_shards(attempt: Attempt) -> list[Process]:
    """The job's own shards that do not run, nor are started again.

    A node that does not answer may do so again until its lease ends, if it ever spoke to this
    scheduler.

    Raises:
        Interrupted: the job is cancelled, or another scheduler has taken over.
    """
    own = [one for one in attempt.processes if one.role == SHARD and not one.standing]
    answers = {one.node.node_id: answer_of(attempt, one.node) for one in own}

    def runs(shard: Process) -> bool:
        node_id = shard.node.node_id
        answer = answers[node_id]
        if answer is None:
            return attempt.context.nodes.has_reported(node_id)
        return shard.runs_on(answer)

    return [shard for shard in own if not runs(shard)]


def answer_of(attempt: Attempt, node: NodeStatus) -> NodeStatus | None:
    """What a node says of itself now; None: nothing.

    Raises:
        Interrupted: the job is cancelled, or another scheduler has taken over.
    """
    try:
        answer: NodeStatus = call(
            attempt.context.channels.node(node.address).Status,
            NodeStatusRequest(),
            what=f"node {node.node_id} at {node.address}: status",
            timeout_s=_STATUS_S,
            stop=attempt.is_cancelled,
        )
    except CallError:
        return None
    return answer


def reserve_homes(
    attempt: Attempt, lost: Sequence[Process], usable: Mapping[str, NodeStatus | None]
) -> Homes | None:
    """Find where shards begin in the place of lost ones; None: there are too few units.

    Args:
        usable: by id, each of their nodes as it is now; None: nothing can begin there.

    Raises:
        JobError: there is no node at all.
    """
    context, decision = attempt.context, attempt.decision
    found: dict[str, NodeStatus] = {}
    units: list[str] = []
    avoid = {node_id for node_id, node in usable.items() if node is None}
    for node_id in dict.fromkeys(shard.node.node_id for shard in lost):
        shards = [shard for shard in lost if shard.node.node_id == node_id]
        had = attempt.record.units_of_shards(node_id)
        node = usable[node_id]
        if node is not None:
            homes = [node]
        elif not had:
            homes = [any_home(decision, context.nodes, avoid)]
        else:
            shares = split_units(len(shards), had)
            kind = decision.workload.ps_type
            groups = [Group(kind, share, one_host=share > 1) for share in shares]
            placed = context.nodes.reserve(attempt.id.job_id, groups, avoid=avoid)
            if placed is None:
                context.nodes.give_back(attempt.id.job_id, units)
                return None
            units += [unit.node_id for unit in placed]
            homes = [placed[first] for first in accumulate(shares[:-1], initial=0)]
        found |= {
            shard.process_id: homes[number % len(homes)] for number, shard in enumerate(shards)
        }
    return Homes(found, units)
