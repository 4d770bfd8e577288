"""Nodes that a job may need get ready to start workers before it does."""

from contextlib import suppress
from pathlib import Path

import pytest

from protos.scheduler_pb2 import END_SUCCEEDED
from scheduler.runs import dispatcher
from tests.scheduler.runs.survivors import Service, trains
from tests.scheduler.stub_node import BATCH, StubNode, serving
from tests.waiting import wait_until


def test_a_spare_node_is_warm_while_a_job_trains_on_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, monkeypatch) as service:
        service.submit(service.spec("job", retries=0))
        worker = service.node.worker("job", 1)
        with (
            StubNode(service.address, "spare") as spare,
            StubNode(service.address, "of-another-type", "gpu") as other,
        ):

            def asked() -> tuple[bool, bool]:
                for node in (spare, other):
                    node.beat()
                return spare.asked_to_warm, other.asked_to_warm

            assert asked() == (False, False), "it may be over before they are ready"
            monkeypatch.setattr(dispatcher, "_SETTLED_S", 0.0)
            assert asked() == (True, False)
            service.node.report(
                worker, phase="done", step=40, samples=40 * BATCH, train_seconds=1.0
            )
            service.end("job")
            assert asked() == (False, False)


@pytest.mark.exhaustive
def test_a_real_one_has_what_workers_are_forked_from(service: Service) -> None:
    name = service.submit(service.may_be_held("needs-two-of-three"))
    trains(service, name, 3)
    with service.held():
        nodes = service.nodes("front")
        assert len(nodes) == 3
        wait_until(lambda: all(_forks(node.pid) for node in nodes), "all are ready", 120)
        assert not any(_forks(node.pid) for node in service.nodes("cpu")), "of the job's shards"
    assert service.end(name).end_reason == END_SUCCEEDED


def _forks(pid: int) -> bool:
    """Whether a node has a process that forks workers."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):
            for child in (task / "children").read_text().split():
                if b"chassis.forking" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return True
    return False
