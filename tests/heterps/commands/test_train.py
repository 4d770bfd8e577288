"""From a job file to a trained model, through every process: quality, equality, repeatability."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import heterps
from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.waiting import wait_until
from workers.data import Dataset
from workers.learning import quality as metrics
from workers.stage.source import evaluation_batches

ROOT = Path(__file__).resolve().parents[3]
FLIGHTS = ROOT / "examples/flights/job.yaml"
KUAIRAND = ROOT / "examples/kuairand/job.yaml"
KUAIRAND_DATA = ROOT.parent / "shared/data/kuairand-pure-ctr"
LAYERS = ("embedding", "wide", "tower", "experts", "head")
REQUIRED_AUC = 0.82
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


def pinned(**stages):
    """Each type with the layers that run on it."""
    return [f"schedule.pin.{name}={kind}" for kind, names in stages.items() for name in names]


def given(folder, **seconds):
    """Costs in place of measured ones, to spare a job its profiling.

    Args:
        folder: where the file goes.
        seconds: by type, what a layer takes for the reference batch, or such by layer.
    """
    cost = {"sync_s": 1e-9, "transfer_s": 1e-9, "memory_bytes": 1e6}
    cost |= {"parallel_compute": 0.5, "parallel_sync": 1.0}  # one unit is the cheapest
    own = {
        kind: value if isinstance(value, dict) else dict.fromkeys(LAYERS, value)
        for kind, value in (seconds or {"cpu": 1e-2}).items()
    }
    layers = [
        {
            "name": name,
            "kind": "dense",
            "cost": {kind: cost | {"compute_s": value[name]} for kind, value in own.items()},
        }
        for name in LAYERS
    ]
    workload = {"name": "given", "reference_batch": 1024, "samples": 1e6, "ps_type": "cpu"}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "workload.yaml"
    path.write_text(json.dumps(workload | {"ps_core_s": 1e-9, "layers": layers}))
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


def test_a_saved_model_predicts_as_it_was_measured(trained):
    status, _ = trained
    model = heterps.load(status.output)
    scores, labels = [], []
    job = load_job(FLIGHTS)
    for _, tensors in evaluation_batches(job, "test", 4096, 0, 1, lambda: False):
        with torch.no_grad():
            scores.append(model(tensors["sparse"], tensors["dense"]).numpy())
        labels.append(tensors["label"].numpy())
    measured = metrics.auc(np.concatenate(scores), np.concatenate(labels))
    assert measured == pytest.approx(status.metrics["test_auc"], abs=1e-5)
    assert len(np.concatenate(labels)) == Dataset(job.data, "test", job.directory).rows


def test_three_shards_give_the_same_quality(client, trained, tmp_path):
    status, _ = run(client, flights(tmp_path, "servers.shards=3", given(tmp_path)))
    assert status.metrics["test_auc"] == pytest.approx(trained[0].metrics["test_auc"], abs=WITHIN)


def test_two_stages_give_the_same_quality_and_say_emulated(client, trained, tmp_path):
    job = flights(tmp_path, *pinned(cpu=LAYERS[:2], v100=LAYERS[2:]))
    status, decision = run(client, job)
    assert [s.type for s in decision.stages] == ["cpu", "v100"]
    assert decision.measured.emulated
    assert status.metrics["test_auc"] == pytest.approx(trained[0].metrics["test_auc"], abs=WITHIN)


def test_two_stages_of_different_widths_give_the_same_quality(client, trained, tmp_path):
    job = flights(
        tmp_path,
        given(
            tmp_path, cpu=dict.fromkeys(LAYERS, 1e3) | dict.fromkeys(LAYERS[:2], 1e-2), v100=1e-3
        ),
        "schedule.min_throughput=60000",
        *pinned(cpu=LAYERS[:2], v100=LAYERS[2:]),
    )
    status, decision = run(client, job)
    first, second = decision.stages
    assert first.units > second.units == 1
    assert status.metrics["test_auc"] == pytest.approx(trained[0].metrics["test_auc"], abs=WITHIN)


@pytest.mark.parametrize("staleness", [0, 1])
def test_one_worker_repeats_its_losses(client, tmp_path, staleness):
    curves = []
    for attempt in ("a", "b"):
        folder = tmp_path / attempt
        options = ("train.max_steps=40", f"train.staleness={staleness}", given(folder))
        status, decision = run(client, flights(folder, *options))
        assert [s.units for s in decision.stages] == [1]
        curves.append(losses(status))
    assert len(curves[0]) == 40
    assert curves[0] == curves[1]


def test_submitting_twice_under_one_id_trains_once(client, tmp_path):
    job = flights(tmp_path, "train.max_steps=5", given(tmp_path))
    assert client.submit(job, job_id="twice") == client.submit(job, job_id="twice")
    assert client.wait("twice", timeout=200).state == "succeeded"
    assert [j.job_id for j in client.jobs()].count("twice") == 1


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


def start_train(heterps, tmp_path, marker, *options):
    return subprocess.Popen(
        [
            *heterps,
            "train",
            str(FLIGHTS),
            "--set",
            f"output={tmp_path}/out",
            "--set",
            "train.epochs=50",
            *options,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HETERPS_TEST": marker},
        cwd=ROOT,
    )


def stage_pids(marker):
    return [pid for pid, text in processes_of(marker) if "workers.stage" in text]


def all_ready(marker):
    """Whether stages and shards have said that they are."""
    texts = [
        text for _, text in processes_of(marker) if "workers.stage" in text or "ps.server" in text
    ]
    files = [re.search(r"--ready-file (\S+)", text) for text in texts]
    return len(texts) >= 2 and all(found and Path(found[1]).exists() for found in files)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ending_train_leaves_no_process_behind(interruptible, tmp_path, number):
    marker = f"end-{number.value}-{os.getpid()}"
    process = start_train(interruptible, tmp_path, marker, "--set", given(tmp_path))
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


def test_a_killed_shard_fails_the_job_and_is_named(interruptible, tmp_path):
    marker = f"shard-{os.getpid()}"
    options = ("--set", "servers.durability=none", "--set", given(tmp_path))
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
    ("overrides", "code", "said"),
    [
        (["train.epoch=3"], 2, "train.epoch"),
        (["data.sparse=[carrier, orgin]"], 1, "orgin"),
        (["data.label=carrier", "data.sparse=[origin]"], 1, "carrier"),
        (["schedule.min_throughput=1e12"], 5, "1,000,000,000,000"),
        (["model.entry=broken.py:build"], 2, "broken.py"),
    ],
)
def test_a_wrong_job_is_one_screen_and_an_exit_code(interruptible, tmp_path, overrides, code, said):
    marker = f"wrong-{os.getpid()}"
    if "schedule.min_throughput=1e12" in overrides:
        overrides = [*overrides, given(tmp_path)]
    options = [part for o in overrides for part in ("--set", o)]
    process = start_train(interruptible, tmp_path, marker, *options)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert said in output
    assert "Traceback" not in output
    wait_until(lambda: not processes_of(marker), "the end of every process", 20.0)
