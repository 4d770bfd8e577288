"""Which units a job may have beside its own, for workers that will be in the place of others."""

from unittest.mock import Mock

from protos.scheduler_pb2 import NodeStatus
from scheduler.state.nodes import Nodes
from scheduler.state.packing import Group


def used(nodes: Nodes) -> dict[str, int]:
    return {status.node_id: status.units_used for status in nodes.listed()}


def test_units_of_those_that_are_replaced_are_used_again_and_no_others() -> None:
    nodes = Nodes(Mock(nodes=list, known_nodes=list), lease_s=60)
    for name in "abc":
        nodes.renew(NodeStatus(node_id=name, kind="node", type="cpu", units=2, address=f"{name}:1"))
    assert nodes.reserve("other", [Group("cpu", 2, one_host=True)])
    first = nodes.reserve("job", [Group("cpu", 2, one_host=True)])
    assert first is not None
    held = [status.node_id for status in first]
    assert nodes.reserve("job", [Group("cpu", 5)], held=held) is None, "another job has two"
    before = used(nodes)
    assert sum(before.values()) == 4
    again = nodes.reserve("job", [Group("cpu", 2)], held=held, avoid=held)
    assert again is not None
    assert not {status.node_id for status in again} & {*held}
    assert used(nodes) == {"a": 2, "b": 2, "c": 2}, "those that it has stay its own"
    nodes.restore("job", [status.node_id for status in again])
    assert sum(used(nodes).values()) == 4
    wide = nodes.reserve("job", [Group("cpu", 4)], held=[s.node_id for s in again])
    assert wide is not None
    assert used(nodes) == {"a": 2, "b": 2, "c": 2}
