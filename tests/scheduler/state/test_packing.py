"""Units packed onto hosts: against every way to do it, and by hand."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.scheduler_pb2 import NodeStatus
from scheduler.state.packing import Group, host_of, pack


def node(name: str, units: int, kind: str = "cpu", host: str = "") -> NodeStatus:
    return NodeStatus(node_id=name, type=kind, units=units, address=f"{host or name}:1")


def packed(groups: list[Group], *nodes: NodeStatus) -> list[str] | None:
    found = pack(groups, nodes, Counter({n.node_id: n.units for n in nodes}))
    return None if found is None else [n.node_id for n in found]


def test_a_stage_is_on_one_host_where_one_holds_it() -> None:
    found = packed([Group("cpu", 2), Group("cpu", 4)], node("a", 4), node("b", 2))
    assert found == ["b", "b", "a", "a", "a", "a"]


def test_a_stage_that_no_host_holds_is_on_the_fewest() -> None:
    found = packed([Group("cpu", 5)], node("a", 1), node("b", 3), node("c", 2))
    assert found == ["b", "b", "b", "c", "c"]


def test_neighbours_are_near_where_it_costs_nothing() -> None:
    groups = [Group("cpu", 1), Group("gpu", 1, follows=True), Group("cpu", 1, follows=True)]
    nodes = [node("a", 2), node("b", 2), node("g", 1, "gpu", "b")]
    assert packed(groups, *nodes) == ["b", "g", "b"]
    assert packed([Group("cpu", 2), Group("cpu", 2, follows=True)], *nodes) in (
        ["a", "a", "b", "b"],
        ["b", "b", "a", "a"],
    )


def test_units_of_several_nodes_on_a_host_are_together() -> None:
    nodes = [node("a1", 2, host="a"), node("b", 3), node("a2", 2, host="a")]
    assert packed([Group("cpu", 4)], *nodes) == ["a1", "a1", "a2", "a2"]


def test_what_must_be_on_one_host_is_or_nothing_is_taken() -> None:
    nodes = [node("a", 2), node("b", 2)]
    assert packed([Group("cpu", 3, one_host=True)], *nodes) is None
    assert packed([Group("cpu", 3)], *nodes) == ["a", "a", "b"]
    assert packed([Group("cpu", 1), Group("cpu", 1), Group("cpu", 2, one_host=True)], *nodes) in (
        ["a", "a", "b", "b"],
        ["b", "b", "a", "a"],
    )


def test_many_stages_are_packed_in_time() -> None:
    groups = [Group("cpu", 1 + n % 3, follows=n > 0) for n in range(60)]
    found = packed(groups, *(node(f"n{i}", 4) for i in range(40)))
    assert found is not None
    assert len(found) == sum(group.units for group in groups)


def _splits(units: int, rooms: list[int]) -> Iterator[tuple[int, ...]]:
    for taken in product(*(range(room + 1) for room in rooms)):
        if sum(taken) == units:
            yield taken


def _least(groups: list[Group], rooms: list[int]) -> int | None:
    """The fewest hosts over all groups, by trying every way."""
    if not groups:
        return 0
    group, *rest = groups
    best = None
    for taken in _splits(group.units, rooms):
        hosts = sum(one > 0 for one in taken)
        if group.one_host and hosts > 1:
            continue
        others = _least(rest, [room - one for room, one in zip(rooms, taken, strict=True)])
        if others is not None and (best is None or hosts + others < best):
            best = hosts + others
    return best


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_few_groups_are_packed_onto_the_fewest_hosts(
    wanted: list[tuple[int, bool]], rooms: list[int]
) -> None:
    groups = [Group("cpu", units, bound, n > 0) for n, (units, bound) in enumerate(wanted)]
    nodes = [node(f"n{i}", units) for i, units in enumerate(rooms)]
    free = Counter({n.node_id: n.units for n in nodes})
    found = pack(groups, nodes, free)
    least = _least(groups, rooms)
    if least is None:
        assert found is None
        return
    assert found is not None
    assert min(free.values()) >= 0
    assert sum(free.values()) == sum(rooms) - len(found)
    hosts = 0
    for group in groups:
        own, found = found[: group.units], found[group.units :]
        hosts += len({host_of(n) for n in own})
    assert hosts <= least + (least > len(groups))  # exact where no group need be spread
