"""From a job file to a trained model, through every process: quality, equality, repeatability."""

import csv
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import heterps
from heterps import Client, Cluster, cli
from heterps.job.file import load_job
from tests.jobs import CLICKS_LAYERS, CPU, write_clicks, write_workload
from tests.rounds import more
from tests.waiting import wait_until
from workers.data import Dataset
from workers.data.held_out import HeldOut
from workers.learning import quality as metrics
from workers.stage.rows.source import evaluation_batches

ROOT = Path(__file__).resolve().parents[3]
FLIGHTS = ROOT / "examples/flights/job.yaml"
KUAIRAND = ROOT / "examples/kuairand/job.yaml"
KUAIRAND_DATA = ROOT.parent / "shared/data/kuairand-pure-ctr"
LAYERS = ("embedding", "wide", "tower", "experts", "head")
REQUIRED_AUC = 0.82
JOB = """\
name: clicks
model: {entry: model.py:build, args: {pause_s: 0.02}}
data: {train: train.csv, label: y, dense: [x], sparse: [a, b]}
train: {epochs: 100000, batch_size: 256, loss: bce_with_logits}
schedule: {resources: resources.yaml}
output: out
"""
WITHIN = 0.003


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster"), types={"cpu": 4}, emulate=["v100"]) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster.address) as connected:
        yield connected


def flights(output, *overrides):
    return load_job(FLIGHTS, [f"output={output}", "schedule.method=greedy", *overrides])


def untested(job):
    """It only trains."""
    job.data.ClearField("valid")
    job.data.ClearField("test")
    return job


def write_small(folder):
    """Write a small job that would take hours."""
    write_clicks(folder)
    (folder / "resources.yaml").write_text(CPU)
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def pinned(**stages):
    """Each type with the layers that run on it."""
    return [f"schedule.pin.{name}={kind}" for kind, names in stages.items() for name in names]


def given(folder, layers=LAYERS, **seconds):
    """Costs in place of measured ones; one unit of a CPU is enough unless `seconds` say more."""
    path = folder / "workload.yaml"
    write_workload(path, layers, seconds or {"cpu": 1e-2}, reference_batch=1024)
    return f"schedule.workload={path}"


def run(client, job):
    job_id = client.submit(job)
    status = client.wait(job_id, timeout=400)
    assert status.state == "succeeded", status.reason
    return status, client.decision_message(job_id)


@pytest.fixture(scope="module")
def trained(client, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return run(client, flights(folder, "servers.shards=1", *pinned(cpu=LAYERS)))


def losses(status):
    with open(Path(status.output) / "loss.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_flights_reaches_its_auc_in_one_stage(trained):
    status, decision = trained
    assert len(decision.stages) == 1
    assert status.metrics["test_auc"] >= REQUIRED_AUC
    assert not decision.measured.emulated
    assert decision.measured.throughput > 0
    assert decision.measured.cost > 0


def test_a_saved_model_predicts_as_it_was_measured(trained, tmp_path):
    status, _ = trained
    model = heterps.load(status.output)
    scores, labels = [], []
    job = load_job(FLIGHTS)
    for _, tensors in evaluation_batches(HeldOut(job), "test", 4096, 0, 1, lambda: False):
        with torch.no_grad():
            scores.append(model(tensors["sparse"], tensors["dense"]).numpy())
        labels.append(tensors["label.label"].numpy())
    measured = metrics.auc(np.concatenate(scores), np.concatenate(labels))
    assert measured == pytest.approx(status.metrics["test_auc"], abs=1e-5)
    assert len(np.concatenate(labels)) == Dataset(job.data, "test", job.directory).rows
    data, target = Path(job.directory, job.data.path, job.data.test), tmp_path / "scores.parquet"
    assert cli.main(["predict", status.output, str(data), "-o", str(target), "--logits"]) == 0
    predicted = pq.read_table(target)["prediction"].to_numpy()
    assert np.array_equal(predicted, model.predict(data, logits=True).numpy())
    found = metrics.auc(predicted, np.concatenate(labels))
    assert found == pytest.approx(status.metrics["test_auc"], abs=1e-7)


@pytest.mark.exhaustive
def test_three_shards_give_the_same_quality(client, trained, tmp_path):
    status, _ = run(client, flights(tmp_path, "servers.shards=3", given(tmp_path)))
    assert status.metrics["test_auc"] == pytest.approx(trained[0].metrics["test_auc"], abs=WITHIN)


@pytest.mark.exhaustive
def test_two_stages_give_the_same_quality_and_say_emulated(client, trained, tmp_path):
    job = flights(tmp_path, *pinned(cpu=LAYERS[:2], v100=LAYERS[2:]))
    status, decision = run(client, job)
    assert [s.type for s in decision.stages] == ["cpu", "v100"]
    assert decision.measured.emulated
    assert status.metrics["test_auc"] == pytest.approx(trained[0].metrics["test_auc"], abs=WITHIN)


def test_two_stages_of_different_widths_on_three_shards_give_the_same_quality(
    client, trained, tmp_path
):
    job = flights(
        tmp_path,
        "servers.shards=3",
        given(
            tmp_path, cpu=dict.fromkeys(LAYERS, 1e3) | dict.fromkeys(LAYERS[:2], 1e-2), v100=1e-3
        ),
        "schedule.min_throughput=60000",
        *pinned(cpu=LAYERS[:2], v100=LAYERS[2:]),
    )
    status, decision = run(client, job)
    first, second = decision.stages
    assert first.units > second.units == 1
    assert decision.measured.emulated
    assert status.metrics["test_auc"] == pytest.approx(trained[0].metrics["test_auc"], abs=WITHIN)


@pytest.mark.parametrize("staleness", [1, *more(0)])
def test_one_worker_repeats_its_losses(client, tmp_path, staleness):
    curves = []
    for attempt in ("a", "b"):
        folder = tmp_path / attempt
        options = ("train.max_steps=40", f"train.staleness={staleness}", given(folder))
        status, decision = run(client, untested(flights(folder, *options)))
        assert [s.units for s in decision.stages] == [1]
        curves.append(losses(status))
    assert len(curves[0]) == 40
    assert curves[0] == curves[1]


def test_submitting_twice_under_one_id_trains_once(client, tmp_path):
    job = load_job(write_small(tmp_path), ["train.epochs=1", given(tmp_path, CLICKS_LAYERS)])
    assert client.submit(job, job_id="twice") == client.submit(job, job_id="twice")
    assert client.wait("twice", timeout=200).state == "succeeded"
    assert [j.job_id for j in client.jobs()].count("twice") == 1


@pytest.mark.exhaustive
@pytest.mark.skipif(
    not KUAIRAND_DATA.is_dir(), reason="the KuaiRand data is not beside the project"
)
def test_kuairand_reaches_gradient_boosting(client, tmp_path):
    job = load_job(
        KUAIRAND, [f"output={tmp_path}", f"data.path={KUAIRAND_DATA}", "schedule.method=greedy"]
    )
    status, _ = run(client, job)
    assert status.metrics["test_auc"] >= 0.737


def processes_of(marker):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (entry / "environ").read_bytes().decode(errors="replace")
        except (OSError, ValueError):
            continue
        if f"HETERPS_TEST={marker}" in environment and "zombie" not in text:
            found.append((int(entry.name), text))
    return found


def start_train(heterps, folder, marker, *overrides):
    file = write_small(folder)
    return subprocess.Popen(
        [*heterps, "train", str(file), *(f"--set={o}" for o in overrides)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HETERPS_TEST": marker},
        cwd=ROOT,
    )


def stage_pids(marker):
    return [pid for pid, text in processes_of(marker) if "-m workers.stage " in text]


def all_ready(marker):
    """Whether stages and shards have said that they are."""
    texts = [
        text
        for _, text in processes_of(marker)
        if "-m workers.stage " in text or "ps.server" in text
    ]
    files = [re.search(r"--ready-file (\S+)", text) for text in texts]
    return len(texts) >= 2 and all(found and Path(found[1]).exists() for found in files)


@pytest.mark.parametrize("number", [signal.SIGINT, *more(signal.SIGKILL)])
def test_ending_train_leaves_no_process_behind(interruptible, tmp_path, number):
    marker = f"end-{number.value}-{os.getpid()}"
    process = start_train(interruptible, tmp_path, marker, given(tmp_path, CLICKS_LAYERS))
    try:
        wait_until(lambda: stage_pids(marker), "training")
        time.sleep(3)  # inside the steps
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGINT else -9), output
        wait_until(lambda: not processes_of(marker), "the end of every process", 20.0)
    finally:
        process.kill()
    assert not list(Path(tmp_path, "out").glob("*/model.json"))


@pytest.mark.exhaustive
def test_a_killed_shard_fails_the_job_and_is_named(interruptible, tmp_path):
    marker = f"shard-{os.getpid()}"
    options = ("servers.durability=none", given(tmp_path, CLICKS_LAYERS))
    process = start_train(interruptible, tmp_path, marker, *options)
    try:
        wait_until(lambda: all_ready(marker), "training")
        time.sleep(1)
        shards = [pid for pid, text in processes_of(marker) if "ps.server" in text]
        os.kill(shards[0], signal.SIGKILL)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 1, output
        assert "shard 0" in output
        assert "SIGKILL" in output
        assert str(shards[0]) in output
        assert "rows are lost" in " ".join(output.split())
        wait_until(lambda: not processes_of(marker), "the end of every process", 20.0)
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("override", "code", "said", "profiled"),
    [
        ("train.epoch=3", 2, "train.epoch", True),
        ("data.sparse=[a, siet]", 2, "siet", True),
        ("data.label=site", 2, "site", False),
        ("schedule.min_throughput=1e12", 5, "1,000,000,000,000", False),
        ("model.entry=broken.py:build", 2, "broken.py", True),
    ],
)
def test_a_wrong_job_is_one_screen_and_an_exit_code(
    interruptible, tmp_path, override, code, said, profiled
):
    marker = f"wrong-{os.getpid()}"
    overrides = [override] if profiled else [override, given(tmp_path, CLICKS_LAYERS)]
    process = start_train(interruptible, tmp_path, marker, *overrides)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert said in output
    assert "Traceback" not in output
    wait_until(lambda: not processes_of(marker), "the end of every process", 20.0)


COUNTING = """
import time
def prepare(path):
    with open({calls!r}, "a") as file:
        file.write("called\\n")
    {then}
"""


def counting(folder, then):
    """Has the small job's data prepared by what notes its calls in a file, and then does this."""
    write_small(folder)
    script = COUNTING.format(calls=str(folder / "calls"), then=then)
    (folder / "count.py").write_text(script)
    return "data.prepare=count.py:prepare", folder / "calls"


def test_data_is_prepared_once(interruptible, tmp_path):
    prepare, calls = counting(tmp_path, "pass")
    marker = f"once-{os.getpid()}"
    process = start_train(
        interruptible,
        tmp_path,
        marker,
        prepare,
        given(tmp_path, CLICKS_LAYERS),
        "train.max_steps=2",
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert calls.read_text().splitlines() == ["called"]


def test_data_that_cannot_be_prepared_leaves_no_cluster(interruptible, tmp_path):
    prepare, _ = counting(tmp_path, "raise RuntimeError('no such data')")
    marker = f"unprepared-{os.getpid()}"
    process = start_train(interruptible, tmp_path, marker, prepare)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "no such data" in output
    assert "Traceback" not in output
    wait_until(lambda: not processes_of(marker), "the end of every process", 20.0)


@pytest.mark.parametrize("number", [signal.SIGINT, *more(signal.SIGKILL)])
def test_ending_train_while_data_is_prepared_leaves_no_process_behind(
    interruptible, tmp_path, number
):
    prepare, calls = counting(tmp_path, "time.sleep(600)")
    marker = f"preparing-{number.value}-{os.getpid()}"
    process = start_train(interruptible, tmp_path, marker, prepare)
    try:
        wait_until(calls.exists, "it prepares")
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGINT else -9), output
        wait_until(lambda: not processes_of(marker), "the end of every process", 20.0)
    finally:
        process.kill()
