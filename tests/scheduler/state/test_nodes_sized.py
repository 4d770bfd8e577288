"""Owners whose units are several of those that nodes declare: no core is given twice."""

import random
from collections import Counter
from unittest.mock import Mock

import pytest

from protos.scheduler_pb2 import NodeStatus
from scheduler.state.nodes import Nodes
from scheduler.state.packing import Group

UNITS = {"a": 7, "b": 4, "c": 1, "d": 8}


def registry() -> Nodes:
    nodes = Nodes(Mock(nodes=list, known_nodes=list), lease_s=600)
    for name, units in UNITS.items():
        address = f"{'h' if name in 'ab' else name}:{ord(name)}"
        nodes.renew(NodeStatus(node_id=name, kind="node", type="cpu", units=units, address=address))
    nodes.renew(NodeStatus(node_id="g", kind="node", type="gpu", units=2, address="g:1"))
    return nodes


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_taken_and_given_back_counts_as_cores(seed: int) -> None:
    draw, nodes = random.Random(seed), registry()
    sizes = {"one": 1, "two": 2, "three": 3, "four": 4}
    for owner, size in sizes.items():
        nodes.size(owner, {"cpu": size} if size > 1 else {})
    held: dict[str, Counter[str]] = {owner: Counter() for owner in sizes}
    refused = 0
    for _ in range(60):
        owner = draw.choice(list(sizes))
        size, mine = sizes[owner], held[owner]
        what = draw.choice(["take", "take", "give", "restore", "again", "release"])
        free = {
            name: units - sum(held[o][name] * sizes[o] for o in sizes)
            for name, units in UNITS.items()
        }
        room = {name: left // size for name, left in free.items()}
        if what == "take":
            wanted, one_host = draw.randint(1, 3), draw.random() < 0.3
            single = ["cpu"] * draw.randint(0, 1)
            placed = nodes.reserve(owner, [Group("cpu", wanted, one_host)], single)
            if placed is None:
                refused += 1
                hosts = [room["a"] + room["b"], room["c"], room["d"]]
                most = max(hosts) if one_host else sum(hosts)
                assert wanted > most or wanted + len(single) > sum(hosts)
            else:
                assert len(placed) == wanted + len(single)
                mine.update(status.node_id for status in placed)
        elif what == "give":
            some = list(mine.elements())[: draw.randint(0, 2)]
            nodes.give_back(owner, some)
            mine.subtract(some)
        elif what == "restore":
            nodes.restore(owner, list(mine.elements()))
        elif what == "again":  # those in the place of what it has may have the same
            before = list(mine.elements())
            placed = nodes.reserve(
                owner, [Group("cpu", len(before))] if before else [], held=before
            )
            assert placed is not None
            nodes.restore(owner, before)
        else:
            nodes.release(owner)
            mine.clear()
        used = {status.node_id: status.units_used for status in nodes.listed()}
        for name, units in UNITS.items():
            assert used[name] == sum(held[o][name] * sizes[o] for o in sizes) <= units
        for other, its in sizes.items():
            left = [
                (units - used[name]) // its + held[other][name] for name, units in UNITS.items()
            ]
            assert nodes.available(other)["cpu"] == sum(left)
            alone = sum(left) - held[other].total()
            assert nodes.available(other, own=False)["cpu"] == alone
            assert nodes.units(other) == {
                "cpu": sum(units // its for units in UNITS.values()),
                "gpu": 2,
            }
    assert refused, "there was room for all"


def test_a_unit_of_several_lies_on_one_node() -> None:
    nodes = registry()
    nodes.size("job", {"cpu": 8})
    assert nodes.could_reserve([Group("cpu", 1)], owner="job")
    assert not nodes.could_reserve([Group("cpu", 2)], owner="job")
    placed = nodes.reserve("job", [Group("cpu", 1)])
    assert placed is not None
    assert [status.node_id for status in placed] == ["d"]
    assert nodes.reserve("job", [Group("cpu", 1)]) is None  # 12 cores are left, on three nodes
    assert nodes.reserve("job", [Group("gpu", 2)]) is not None  # of other types it is one


def test_what_is_held_does_not_become_more() -> None:
    nodes = registry()
    nodes.restore("job", ["d", "d"])
    with pytest.raises(ValueError, match="job holds units of cpu of another size"):
        nodes.size("job", {"cpu": 2})
    nodes.size("job", {"gpu": 2})  # of which it has none
    nodes.release("job")
    nodes.size("job", {"cpu": 2})
    nodes.restore("job", ["d"])
    with pytest.raises(ValueError, match="another size"):
        nodes.size("job", {})
