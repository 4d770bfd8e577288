"""`heterps replan`: from a decision file and from a kept job, and the job file it writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from heterps import cli
from heterps.client import archive
from heterps.errors import OK, USAGE, HeterpsError
from heterps.job.file import load_job
from heterps.job.rewrite import job_content, write_job
from heterps.report import console
from heterps.report.proposal import proposal_line
from protos import scheduler_pb2 as pb
from scheduler import Decision, load_workload, plan
from scheduler.decision.record import Measured
from scheduler.replanning.measure import Measurement
from scheduler.replanning.replan import propose

LAYERS = {"embedding": {"cpu": 0.05}, "tower": {"cpu": 4.0, "t4": 0.05}}


@pytest.fixture
def run(capfd):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["replan", *arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture(scope="module")
def decision() -> Decision:
    """What ran: the tower took 20 times as long on a t4 as predicted."""
    base = {"sync_s": 0, "transfer_s": 0, "parallel_compute": 1, "parallel_sync": 1}
    layers = [
        {
            "name": name,
            "kind": "dense",
            "cost": {t: {**base, "compute_s": s, "memory_bytes": 0} for t, s in costs.items()},
        }
        for name, costs in LAYERS.items()
    ]
    workload = {"name": "clicks", "reference_batch": 100, "samples": 1e8, "layers": layers}
    types = [
        {"name": "cpu", "price_per_hour": 0.04, "limit": 8, "memory_bytes": 4e9, "device": "cpu"},
        {"name": "t4", "price_per_hour": 2.35, "limit": 4, "memory_bytes": 1.6e10},
    ]
    found = plan(workload, {"types": types}, method="exact")
    assert found.assignment == ("cpu", "t4")
    busy = (found.stages[0].compute_s, 20 * found.stages[1].compute_s)
    return replace(
        found, measured=Measured(1 / max(busy), found.plan.price_per_hour, 1.0, 100.0, False, busy)
    )


@pytest.fixture
def file(decision: Decision, tmp_path: Path) -> Path:
    path = tmp_path / "decision.json"
    decision.export(path)
    return path


def test_help_says_what_it_needs(run):
    code, out, _ = run("--help")
    assert code == OK
    assert "--moving-seconds" in out


def test_a_standing_proposal_is_a_few_lines_of_its_jobs_report(decision: Decision):
    assert decision.measured is not None
    proposal = propose(decision, Measurement.of_run(decision.measured))
    screen = console()
    with screen.capture() as captured:
        screen.print(proposal_line(proposal, "clicks-aaa111"))
    lines = captured.get().strip().splitlines()
    assert lines[0] == "Another plan"
    assert "it saves $" in lines[1]
    assert "heterps replan clicks-aaa111" in lines[-1]


def test_a_decision_file_is_replanned(run, file: Path):
    code, out, _ = run("--file", str(file))
    assert code == OK
    assert "Proposed: it saves $" in out
    assert " 20.00 " in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_json_has_the_whole_proposal(run, file: Path):
    code, out, _ = run("--file", str(file), "--json")
    found = json.loads(out)["proposal"]
    assert code == OK
    assert found["worthwhile"]
    assert found["moving_cost"] == 0
    assert found["savings"] == pytest.approx(found["current_cost"] - found["proposed_cost"])
    assert found["proposed"]["assignment"] == ["cpu", "cpu"]


def test_of_few_samples_that_are_left_none_is_moved(run, file: Path):
    code, out, _ = run("--file", str(file), "--remaining", "1000", "--moving-seconds", "600")
    assert code == OK
    assert "Not proposed" in out
    assert "600 s" in out


def test_a_job_that_was_kept_is_replanned(run, decision: Decision):
    status = pb.JobStatus(job_id="clicks-aaa111", name="clicks", state=pb.SUCCEEDED)
    archive.add(status, decision.to_message(), [])
    code, out, _ = run("clicks")
    assert code == OK
    assert "Proposed" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["clicks", "--file", "decision.json"], "expected one of them"),
        (["--file", "none.json"], "none.json"),
        (["--file", "FILE", "--remaining", "0"], "remaining_samples: 0.0: expected"),
        (["--file", "FILE", "--method", "oracle"], "method: 'oracle': expected"),
        (["--file", "FILE", "--margin", "-1"], "threshold.margin: -1.0: expected"),
        (["--file", "FILE", "--moving-seconds", "nan"], "moving.restart_s: nan: expected"),
    ],
)
def test_wrong_arguments_are_named(run, file: Path, arguments: list[str], said: str):
    code, _, err = run(*(str(file) if text == "FILE" else text for text in arguments))
    assert code == USAGE
    assert said in err


def test_what_is_written_without_a_job_is_a_schedule_and_a_workload(
    run, file: Path, decision: Decision, tmp_path: Path
):
    target = tmp_path / "again.yaml"
    code, out, _ = run("--file", str(file), "--write", str(target), "--json")
    assert code == OK
    assert json.loads(out)["written"] == [str(target), str(tmp_path / "again.workload.json")]
    assert target.read_text().startswith("schedule:")
    workload = load_workload(tmp_path / "again.workload.json")
    assert decision.workload is not None
    assert workload.samples == decision.workload.samples
    assert workload.layers[1].cost["t4"].compute_s == pytest.approx(20 * 0.05)
    assert workload.layers[1].cost["cpu"] == decision.workload.layers[1].cost["cpu"]


def test_a_written_job_is_the_job_with_the_new_plan(job: Path, decision: Decision, tmp_path: Path):
    ran = load_job(job, ["train.staleness=0", "train.seed=7", "schedule.min_throughput=5"])
    assert decision.measured is not None
    proposal = propose(decision, Measurement.of_run(decision.measured), method="exact")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    written, _ = write_job(folder / "new.yaml", ran, decision, proposal)
    again = load_job(written)
    assert again.train == ran.train
    assert again.data.sparse == ran.data.sparse
    assert again.model.args == ran.model.args
    assert again.schedule.offered == ran.schedule.offered
    assert dict(again.schedule.pin) == {"embedding": "cpu", "tower": "cpu"}
    assert again.schedule.min_throughput == 5
    assert Path(again.data.path) == Path(ran.directory, ran.data.path)
    planned = plan(again.schedule.given, again.schedule.offered, 5, "exact", pin=again.schedule.pin)
    assert [s.type for s in planned.stages] == [s.type for s in proposal.proposed.stages]
    with pytest.raises(HeterpsError, match=r"new\.yaml: is there already"):
        write_job(folder / "new.yaml", ran, decision, proposal)


def test_a_job_as_content_reads_back_as_it_was(job: Path, tmp_path: Path):
    ran = load_job(job)
    content = job_content(ran)
    path = tmp_path / "copy.json"
    path.write_text(json.dumps(content))
    again = load_job(path)
    for name in ("name", "model", "train", "schedule"):
        for spec in (again, ran):
            spec.model.entry = Path(spec.model.entry).name
            spec.schedule.resources = Path(spec.schedule.resources).name
        assert getattr(again, name) == getattr(ran, name)
