"""Nodes come a page at a time, each once, also where some go in between."""

from unittest.mock import Mock

import pytest

from protos.scheduler_pb2 import NodeStatus
from scheduler.state.nodes import Nodes

IDS = [f"node-{number}" for number in range(7)]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr("scheduler.state.nodes.PAGE", 3)
    made = Nodes(Mock(nodes=list, known_nodes=list), lease_s=60)
    for name in reversed(IDS):
        made.renew(NodeStatus(node_id=name, kind="node", type="cpu", units=1))
    return made


@pytest.mark.parametrize(("limit", "most"), [(0, 3), (2, 2), (99, 3)])
def test_each_is_on_one_page(nodes: Nodes, limit: int, most: int) -> None:
    found: list[str] = []
    after = ""
    while True:
        page, after = nodes.page(limit, after)
        assert 1 <= len(page) <= most
        found += [status.node_id for status in page]
        if not after:
            break
    assert found == IDS


def test_a_page_goes_on_after_a_node_that_has_left(nodes: Nodes) -> None:
    _, after = nodes.page(0, "")
    nodes.leave(NodeStatus(node_id=after, kind="node"))
    page, _ = nodes.page(0, after)
    assert [status.node_id for status in page] == IDS[3:6]
