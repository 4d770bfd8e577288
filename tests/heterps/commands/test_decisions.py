"""Decisions that were kept: listed, shown from a job or a file, exported and compared."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import scheduler
from heterps.client import archive
from heterps.client.client import Client
from heterps.errors import OK, UNREACHABLE, USAGE
from heterps.view.changes import compare
from protos import scheduler_pb2 as pb
from protos.job_pb2 import JobSpec
from scheduler.decision.record import Decision, Measured
from scheduler.problem.plan import PlanStage
from scheduler.replanning.proposal import Proposal
from scheduler.service.process import SchedulerProcess
from scheduler.state.redis_server import EmbeddedRedis
from scheduler.state.store import Store

PLAN = Path(__file__).resolve().parents[3] / "examples/plan"
Run = Callable[..., tuple[int, str, str]]


@cache
def planned(floor: float = 100_000.0, price: float = 0.35) -> Decision:
    workload = scheduler.load_workload(PLAN / "workload.yaml")
    resources = scheduler.load_resources(PLAN / "resources.yaml")
    types = tuple(
        replace(kind, price_per_hour=price) if kind.name == "t4" else kind
        for kind in resources.types
    )
    return scheduler.plan(workload, replace(resources, types=types), floor, method="greedy")


def measured(decision: Decision) -> Decision:
    stages = tuple(stage.compute_s for stage in decision.stages)
    found = Measured(
        0.8 * decision.throughput, decision.plan.price_per_hour, 2.0, 60.0, False, stages
    )
    return replace(decision, measured=found)


def proposal() -> Proposal:
    """One to move from the floor's plan to the cheapest."""
    return Proposal(
        worthwhile=True,
        reasons=("Moving pays.",),
        remaining_samples=1e8,
        overhead=1.0,
        current_cost=2.0,
        proposed_cost=1.0,
        moving_s=60.0,
        moving_cost=0.1,
        savings=1.0,
        current=planned(600_000.0).plan,
        proposed=planned(),
    )


@pytest.fixture
def kept() -> tuple[str, str]:
    """Two jobs of clusters that are gone, the second measured."""
    jobs = (("first-aaa111", planned()), ("second-bbb222", measured(planned(600_000.0))))
    for number, (job_id, decision) in enumerate(jobs):
        status = pb.JobStatus(
            job_id=job_id, name=job_id[:5], state=pb.SUCCEEDED, submitted_at=1e9 + number
        )
        archive.add(status, decision.to_message(), [])
    return jobs[0][0], jobs[1][0]


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A job of the scheduler that commands find."""
    job_id = "live-ccc333"
    with EmbeddedRedis(tmp_path) as server:
        store = Store(server.url)
        now = time.time()
        status = pb.JobStatus(job_id=job_id, name="live", state=pb.SUCCEEDED, submitted_at=now)
        store.submit(status, JobSpec())
        store.put_decision(job_id, planned(600_000.0).to_message())
        record = pb.Replan()
        record.proposal.CopyFrom(proposal().to_message())
        store.put_replan(job_id, record)
        store.close()
        process = SchedulerProcess("127.0.0.1:0", server.url)
        monkeypatch.setenv("HETERPS_SCHEDULER", process.start(lambda: None))
        yield job_id
        process.stop()


def test_kept_decisions_are_listed_with_what_was_measured(run: Run, kept: tuple[str, str]) -> None:
    code, out, _ = run("decisions")
    assert code == OK
    first, second = (next(line for line in out.splitlines() if name in line) for name in kept)
    assert "greedy" in first
    assert "0.80" not in first
    assert second.endswith("0.80")
    code, out, _ = run("decisions", "--json", "--last", "1")
    assert code == OK
    (only,) = json.loads(out)
    assert only["job_id"] == kept[1]
    assert only["measured"]["throughput"] == pytest.approx(0.8 * only["throughput"])


def test_decisions_of_a_cluster_are_listed_and_compared(
    run: Run, kept: tuple[str, str], live: str
) -> None:
    with Client() as client:
        (found,) = client.decisions()
        assert found.decision.cost == planned(600_000.0).cost
        assert found.decision.stages == planned(600_000.0).stages
        assert found.decision.workload is None, "a list leaves out what is large"
        assert client.decision(live).workload == planned(600_000.0).workload
    code, out, _ = run("decisions")
    assert code == OK
    assert all(name in out for name in (*kept, live))
    code, out, _ = run("diff", kept[0], "live")
    assert code == OK
    assert "floor on throughput" in out


def test_a_standing_proposal_is_shown_with_its_job(run: Run, live: str) -> None:
    code, out, _ = run("inspect", live)
    assert code == OK
    assert "Moving pays." in out
    assert f"heterps replan {live}" in out


def test_without_any_the_list_says_where_it_looked(run: Run) -> None:
    code, _, err = run("decisions")
    assert code == UNREACHABLE
    assert "heterps up" in err


def test_a_file_is_shown_like_a_job(run: Run, kept: tuple[str, str], tmp_path: Path) -> None:
    path, page = tmp_path / "decision.json", tmp_path / "decision.html"
    code, out, _ = run("inspect", kept[1], "--export", str(path))
    assert code == OK
    assert f"wrote {path}" in out
    assert Decision.load(path) == measured(planned(600_000.0))
    _, of_job, _ = run("inspect", kept[1])
    code, of_file, _ = run("inspect", "--file", str(path))
    assert code == OK
    assert of_job.startswith(of_file.rstrip())
    assert "Predicted and measured" in of_file
    code, out, _ = run("inspect", "--file", str(path), "--html", str(page))
    assert code == OK
    assert page.read_text().startswith("<!doctype html>")
    assert "Cost against throughput" in page.read_text(), "the curve is found when it is drawn"
    code, out, _ = run("inspect", "--file", str(path), "--json")
    assert json.loads(out)["stages"][0]["slack"] >= 0


def test_wrong_names_and_files_exit_with_2(run: Run, kept: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"types": []}')
    for arguments, said in (
        (["inspect", "--file", str(path)], "types: unknown key"),
        (["inspect", "--file", str(tmp_path / "none.json")], "none.json: cannot be read"),
        (["inspect", kept[0], "--file", str(path)], "expected one of them"),
        (["inspect", kept[0], "--html", str(tmp_path / "no" / "a.html")], "cannot be written"),
        (["diff", kept[0], str(path)], "types: unknown key"),
        (["diff", kept[0]], "Missing argument 'B'"),
    ):
        code, _, err = run(*arguments)
        assert code == USAGE, arguments
        assert said in err


def test_a_job_without_a_decision_says_so(run: Run, tmp_path: Path) -> None:
    status = pb.JobStatus(job_id="none-ddd444", name="none", state=pb.FAILED, submitted_at=1.0)
    archive.add(status, None, [])
    code, _, err = run("inspect", "none", "--html", str(tmp_path / "a.html"))
    assert code == USAGE
    assert "job none-ddd444: it has no decision" in err
    assert run("inspect", "none")[0] == OK, "how it ended is shown"


def test_a_difference_names_inputs_plan_and_figures() -> None:
    before, after = planned(), planned(600_000.0, price=0.5)
    changes = compare(before, after)
    inputs = {change.key: (change.before, change.after) for change in changes.inputs}
    assert inputs == {"min_throughput": (100_000.0, 600_000.0), "t4.price_per_hour": (0.35, 0.5)}
    moved = {change.key: change for change in changes.plan}
    for layer, old, new in zip(
        before.workload.layers, before.assignment, after.assignment, strict=True
    ):
        assert (f"layer.{layer.name}" in moved) == (old != new)
    figures = {change.key: change for change in changes.figures}
    assert figures["cost"].before == before.cost
    assert figures["cost"].after == after.cost
    assert json.loads(json.dumps(changes.to_json(), allow_nan=False))


def test_a_difference_names_steps_and_what_keeps_layers_together() -> None:
    before = planned()
    first, *others = before.workload.layers
    layers = (replace(first, uncut=True, weight_bytes=8.0), *others)
    plan = replace(before.plan, micro_batches=8, staleness=0)
    after = replace(before, plan=plan, workload=replace(before.workload, layers=layers, batch=64))
    changes = compare(before, after)
    assert {change.key: change.after for change in changes.inputs} == {
        "workload.batch": 64,
        f"{first.name}.uncut": True,
        f"{first.name}.weight_bytes": 8.0,
    }
    assert {change.key: change.after for change in changes.plan} == {
        "micro_batches": 8,
        "staleness": 0,
    }


def test_a_difference_names_units_of_stages_on_one_type_and_their_threads() -> None:
    plan = replace(planned().plan, stages=stages(2, 1))
    before = replace(planned(), plan=plan)
    first, *_, fourth = (layer.name for layer in planned().workload.layers[:4])
    for made, expected in (
        (stages(1, 2), {f"stage.{first}": (2, 1), f"stage.{fourth}": (1, 2)}),
        (stages(2, 1, threads=4), {"threads.cpu": (1, 4)}),
    ):
        changes = compare(before, replace(before, plan=replace(plan, stages=made)))
        assert {one.key: (one.before, one.after) for one in changes.plan} == expected


def stages(one: int, other: int, threads: int = 0) -> tuple[PlanStage, ...]:
    """The layers in two stages on CPUs."""
    last = len(planned().workload.layers) - 1
    first = PlanStage(0, 2, "cpu", one, 1e-6, 1e-6, 1e6, True, threads)
    return first, replace(first, first=3, last=last, units=other)


def test_a_decision_does_not_differ_from_itself(run: Run, tmp_path: Path) -> None:
    changes = compare(planned(), planned())
    assert not changes.inputs
    assert not changes.plan
    assert not any(change.is_real for change in changes.figures)
    path = tmp_path / "a.json"
    planned().export(path)
    code, out, _ = run("diff", str(path), str(path))
    assert code == OK
    assert "the same" in out


def test_without_inputs_only_demands_are_compared(run: Run, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(planned().to_json()))
    planned(600_000.0, price=0.5).export(second)
    code, out, _ = run("diff", str(first), str(second))
    assert code == OK
    assert "first: kept without workload" in out
    assert "floor on throughput" in out
    assert "t4.price_per_hour" not in out
