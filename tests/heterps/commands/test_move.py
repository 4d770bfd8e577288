"""`heterps move`: what it says, and the exit code that goes with it."""

import json
import threading
from pathlib import Path

import pytest

from heterps import cli
from heterps.errors import JOB_FAILED, OK
from protos.scheduler_pb2 import JobRequest
from tests.scheduler.stub_node import BATCH, Service, serving
from tests.waiting import wait_until


@pytest.fixture
def service(tmp_path, monkeypatch):
    with serving(tmp_path, monkeypatch) as made:
        yield made


def test_the_best_plan_is_an_answer_and_a_move_that_comes_too_late_is_none(
    service: Service, tmp_path: Path, capsys
):
    node, move = service.node, ["move", "clicks", "--scheduler", service.address]
    service.submit(service.spec("clicks", retries=0))
    worker = node.worker("clicks", 1)
    for number in range(1, 12):
        how_far = {"step": 10 * number, "samples": 10 * number * BATCH, "busy_s": 1.0 * number}
        node.report(worker, **how_far, stepped_s=2.0 * number, total_steps=100_000)
    assert cli.main(move) == OK
    said = capsys.readouterr()
    told = "job clicks has the best plan already, by what its run was measured to take\n"
    assert (said.out, said.err) == (told, "")
    assert cli.main([*move, "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["moves"] == []

    plan = service.stub.GetDecision(JobRequest(job_id="clicks"), timeout=20)
    from scheduler import Decision

    Decision.from_message(plan).export(tmp_path / "plan.json")

    def end() -> None:
        wait_until(lambda: node.asked_to_pause, "its workers are told to wait")
        far = {"step": 200, "samples": 200 * BATCH, "train_seconds": 30.0}
        node.report(worker, phase="done", **far)

    ending = threading.Thread(target=end)
    ending.start()
    assert cli.main([*move, "--plan", str(tmp_path / "plan.json")]) == JOB_FAILED
    ending.join()
    said = capsys.readouterr()
    kept = "clicks keeps its plan, 1 cpu: the attempt ended before it could go over\n"
    assert (said.out, said.err) == ("", kept)
    assert cli.main(["inspect", "clicks", "--scheduler", service.address, "--json"]) == OK
    (used,) = json.loads(capsys.readouterr().out)["plans"]
    assert (used["plan"], used["reason"], used["from_step"]) == ("1 cpu", "planned", 0)
    assert used["measured"] == 200 * BATCH / 30.0
