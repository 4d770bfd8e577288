"""`heterps sweep` over real jobs, on a cluster that stays and on one of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import heterps
from heterps import Client, Cluster, cli
from heterps.job.file import load_job
from tests.heterps.sweep_jobs import write_job
from tests.waiting import wait_until

RATE = "train.optimizer.learning_rate"


def run(capsys, *arguments):
    code = cli.main(["sweep", *map(str, arguments), "--json"])
    written = capsys.readouterr()
    return code, json.loads(written.out) if written.out else {}, written.err


def test_a_sweep_on_a_standing_cluster_goes_on_and_keeps_the_best(tmp_path, capsys):
    file = write_job(tmp_path)
    with Cluster(tmp_path / "cluster", types={"cpu": 2}) as cluster, Client(cluster.address) as c:
        common = (file, "--set", "lr=log:1e-4..1e-1", "--scheduler", cluster.address)
        code, first, error = run(capsys, *common, "--trials", 1)
        assert code == 0, error
        code, found, error = run(capsys, *common, "--trials", 1)
        assert code == 0, error
        jobs = {job.job_id: job for job in c.jobs()}
    assert found == first
    assert [trial["state"] for trial in found["trials"]] == ["complete"]
    assert [*jobs] == [trial["job_id"] for trial in found["trials"]]
    for trial in found["trials"]:
        job = jobs[trial["job_id"]]
        assert job.name == f"clicks-trial-{trial['number']}"
        assert trial["value"] == job.metrics["valid_auc"]
        assert [one.step for one in job.validated] == [10, 20, 30]
        assert max(one.metrics["valid_auc"] for one in job.validated) == trial["value"]
    best = max(found["trials"], key=lambda trial: trial["value"])
    assert found["best"] == best
    assert found["direction"] == "max"
    job = load_job(found["job_file"])
    assert job.train.optimizer.learning_rate == best["values"][RATE]
    assert kept(found)["metrics"]["valid_auc"] == best["value"]


def kept(found):
    """What the model that is kept says of itself."""
    facts = json.loads(Path(found["model"], "model.json").read_text())
    assert facts["job_id"] == found["best"]["job_id"]
    return facts


def children_of(marker):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ValueError):
            continue
        if f"HETERPS_TEST={marker}" in environment and state != "Z":
            found.append(int(entry.name))
    return found


@pytest.mark.exhaustive
def test_ctrl_c_cancels_and_cleans_up_and_the_same_command_goes_on(
    interruptible, tmp_path, home, capsys
):
    file = write_job(tmp_path, **{"model: {entry: model.py:build}": SLOW})
    ranges = ("--set", "lr=log:1e-4..1e-1")
    sweep = [*interruptible, "sweep", str(file), *ranges, "--trials=1"]
    marker = tmp_path.name
    started = subprocess.Popen(
        [*sweep, "--units=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HETERPS_TEST": marker},
    )
    lines = iter(started.stdout.readline, "")
    assert any("trial 0 begins" in line for line in lines)
    started.send_signal(signal.SIGINT)
    rest = started.communicate(timeout=60)[0]
    assert started.returncode == 130, rest
    assert "trial 0 interrupted" in rest
    assert "go on with the same command" in rest
    wait_until(lambda: not children_of(marker))
    assert not (tmp_path / "job.best.trials").exists()
    code, found, error = run(capsys, file, *ranges, "--trials", 1, "--units", 2)
    assert code == 0, error
    before, after = found["trials"]
    assert (before["state"], after["state"]) == ("interrupted", "complete")
    assert before["values"] == after["values"]
    assert found["best"] == after
    assert not (tmp_path / "job.best.trials").exists()
    job = load_job(found["job_file"])
    assert job.train.optimizer.learning_rate == after["values"][RATE]
    assert kept(found)["metrics"]["valid_auc"] == after["value"]
    scores = heterps.load(found["model"]).predict(tmp_path / "valid.csv")
    assert len(scores) == 256


SLOW = "model: {entry: model.py:build, args: {pause_s: 0.01}}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "train.epoch=int:1..3"], "did you mean train.epochs?"),
        (["--set", "lr=0.1"], "expected a range to try"),
        ([], "expected a range to try"),
        (["--set", "lr=log:1e-3..1e-1", "--metric", "valid_auc"], "none beside train.validate"),
        (["--set", "lr=log:1e-3..1e-1", "--trials", "0"], "--trials"),
        (["--set", "lr=log:1e-3..1e-1", "--study", "taken.study"], "expected no file there"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(tmp_path, capsys, arguments, said):
    (tmp_path / "taken.best.yaml").write_text("name: mine")
    code, _, error = run(capsys, write_job(tmp_path), *arguments)
    assert code == 2
    assert said in error
    assert not (tmp_path / "job.study").exists()


def test_without_optuna_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, error = run(capsys, write_job(tmp_path), "--set", "lr=log:1e-3..1e-1")
    assert code == 2
    assert "pip install 'heterps[sweep]'" in error
