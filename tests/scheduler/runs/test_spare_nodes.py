"""Nodes that a job may need get ready to start workers before it does."""

from pathlib import Path

import pytest

from scheduler.runs import dispatcher
from tests.scheduler.stub_node import BATCH, StubNode, serving


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
