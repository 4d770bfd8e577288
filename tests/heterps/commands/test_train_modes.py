"""Jobs in mixed precision, with experts split over a stage's workers, and on a GPU."""

import csv
import json
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import heterps
from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.jobs import write_workload
from workers.model.code.entry import load_entry

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples/moe_lm"
STEPS = 30
MODEL = {"vocabulary": 256, "layers": 1, "dim": 32, "hidden": 32, "experts": 5}
LAYERS = ("embedding", "attention0", "experts0", "head")
SPIKE = 4  # the step in which one worker's gradients overflow
SPIKED = f"""
import torch
from torch import nn

import model


class Overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, now):
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf") if ctx.now else grad, None


class Spike(nn.Module):
    count = 0

    def forward(self, x):
        if not self.training:
            return x
        self.count += 1
        together = torch.distributed.is_initialized()  # two workers of two micro-batches a step
        now = self.count == (2 if together else 4) * {SPIKE} + 1
        now = now and (not together or torch.distributed.get_rank() == 1)
        return Overflow.apply(x, now)


def build(**arguments):
    made = model.build(**arguments)
    made.embedding = nn.Sequential(made.embedding, Spike())  # the other worker sees none of it
    return made
"""


BOMB = """
import torch
from torch import nn

import model


class Bomb(nn.Module):
    count = 0

    def forward(self, x):
        if not self.training:
            return x
        self.count += 1  # four micro-batches a step
        return x * float("nan") if self.count == 4 * 6 + 3 else x


def build(**arguments):
    made = model.build(**arguments)
    made.head = nn.Sequential(Bomb(), made.head)
    return made
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The language model with experts, and parts of the library for it."""
    made = tmp_path_factory.mktemp("modes")
    shutil.copytree(EXAMPLE, made / "moe_lm")
    file = made / "moe_lm/job.yaml"
    file.write_text(file.read_text().replace("  prepare: prepare.py:sources\n", ""))
    (made / "moe_lm/spike.py").write_text(SPIKED)
    (made / "moe_lm/bomb.py").write_text(BOMB)
    library, write = (
        load_entry(f"prepare.py:{name}", EXAMPLE, "data.prepare") for name in ("library", "write")
    )
    # 5 batches of held-out windows: an odd number, for an even number of workers.
    write(made / "data", "", (library(valid=False)[:70_000], library(valid=True)[: 64 * 150]), 64)
    return made


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    place = tmp_path_factory.mktemp("cluster")
    with (
        Cluster(place, types={"cpu": 3, "v100": 2}, emulate=["v100"]) as cluster,
        Client(cluster.address) as connected,
    ):
        yield connected


def job_of(folder, name, types, workers, *overrides):
    """A job whose layers are on these types, with so many workers on the busiest stage.

    Costs are given such that two units of a v100, or of a CPU that has everything, are wanted: two
    are 1.33 times as fast as one.
    """
    busy = "v100" if "v100" in types else "cpu"
    placed = dict(zip(LAYERS, types, strict=True))
    seconds = {
        kind: {
            layer: 1e3 if own != kind else 1e-3 if own == busy else 1e-5
            for layer, own in placed.items()
        }
        for kind in ("cpu", "v100")
    }
    write_workload(folder / f"{name}.yaml", LAYERS, seconds, reference_batch=32, samples=4e3)
    total = 1e-3 * types.count(busy)
    pins = [f"schedule.pin.{layer}={kind}" for layer, kind in placed.items()]
    arguments = [f"model.args.{key}={value}" for key, value in MODEL.items()]
    return load_job(
        folder / "moe_lm/job.yaml",
        [
            f"name={name}",
            f"output={folder}/out",
            f"data.path={folder}/data",
            f"train.max_steps={STEPS}",
            "train.micro_batches=4",
            "train.staleness=0",  # as experts that are split train
            "train.optimizer.learning_rate=0.01",
            "train.optimizer.warmup_steps=5",
            "schedule.method=greedy",
            f"schedule.workload={folder}/{name}.yaml",
            f"schedule.min_throughput={(0.6 + 0.3 * workers) * 32 / total}",
            *pins,
            *arguments,
            *overrides,
        ],
    )


def logs_of(client, status):
    """What each process wrote."""
    texts = defaultdict(str)
    for chunk in client.logs(status.job_id):
        texts[chunk.process] += chunk.text
    return texts


def run(client, job):
    """The status, what each process logged, and the losses."""
    status = client.wait(client.submit(job), timeout=300)
    log = logs_of(client, status)
    assert status.state == "succeeded", status.reason
    with open(Path(status.output) / "loss.csv") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == STEPS
    return status, log, np.array(losses)


@pytest.fixture(scope="module")
def plain(folder, client):
    """The job in float32, with one worker."""
    found = run(client, job_of(folder, "plain", ("cpu",) * 4, 1))
    assert units(client, found[0]) == [1]
    return found


def units(client, status):
    return [stage.units for stage in client.decision_message(status.job_id).stages]


@pytest.mark.exhaustive
def test_split_experts_give_what_whole_ones_give(folder, client, plain):
    # The stage in the middle, so that micro-batches pass it both ways.
    job = job_of(folder, "split", ("cpu", "cpu", "v100", "cpu"), 2, "train.split_experts=true")
    status, log, losses = run(client, job)
    assert units(client, status) == [1, 2, 1]
    assert "experts of experts0.moe are split over 2 workers" in log["stage 1 worker 1"]
    expected, _, expected_losses = plain
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    assert status.metrics == pytest.approx(expected.metrics, rel=1e-3)
    saved = load_file(Path(status.output) / "dense.safetensors")
    whole = load_file(Path(expected.output) / "dense.safetensors")
    assert saved.keys() == whole.keys()
    assert saved["experts0.moe.w1"].shape == (5, 32, 32)
    for name, weights in whole.items():
        torch.testing.assert_close(saved[name], weights, rtol=0.02, atol=2e-3)
    model = heterps.load(status.output)
    assert torch.equal(model.experts0.moe.w2, saved["experts0.moe.w2"])


@pytest.mark.exhaustive
def test_split_experts_are_validated_as_whole_ones(folder, client):
    told = "train.validate.every=10 steps", "train.validate.metric=valid_loss"
    plan, found = ("cpu", "cpu", "v100", "cpu"), []
    runs = ("whole", ("cpu",) * 4, 1, ()), ("split", plan, 2, ("train.split_experts=true",))
    for name, types, workers, more in runs:
        status, _, _ = run(client, job_of(folder, f"valid-{name}", types, workers, *told, *more))
        facts = json.loads((Path(status.output) / "model.json").read_text())
        found.append(facts["validated"])
    whole, split = found
    assert [one["step"] for one in split] == [one["step"] for one in whole]
    assert len(whole) == STEPS // 10
    for one, other in zip(split, whole, strict=True):
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-3)


def test_bf16_is_near_fp32(folder, client, plain):
    job = job_of(folder, "bf16", ("cpu", "cpu", "v100", "v100"), 1, "train.precision=bf16")
    status, log, losses = run(client, job)
    assert "in bf16 on cpu" in log["stage 0 worker 0"]
    assert (losses != plain[2]).any()
    assert losses == pytest.approx(plain[2], rel=0.02)
    assert status.metrics["valid_loss"] == pytest.approx(plain[0].metrics["valid_loss"], rel=0.02)
    saved = load_file(Path(status.output) / "dense.safetensors")
    assert {w.dtype for w in saved.values() if w.is_floating_point()} == {torch.float32}


def test_fp16_skips_what_overflows_on_all_workers_alike(folder, client):
    """Two workers that read their own data and share out the experts: one stage, in lockstep."""
    job = job_of(
        folder,
        "fp16",
        ("cpu",) * 4,
        2,
        "train.precision=fp16",
        "train.split_experts=true",
        "model.entry=spike.py:build",
    )
    status, log, losses = run(client, job)
    assert units(client, status) == [2]
    skipped = [re.findall(r"step (\d+) skipped", log[f"stage 0 worker {n}"]) for n in (0, 1)]
    assert skipped[0] == skipped[1]
    assert str(SPIKE) in skipped[0]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.exhaustive
def test_fp16_over_two_stages_skips_on_both_alike(folder, client):
    job = job_of(
        folder,
        "stages",
        ("cpu", "cpu", "v100", "v100"),
        1,
        "train.precision=fp16",
        "model.entry=spike.py:build",
    )
    status, log, losses = run(client, job)
    assert units(client, status) == [1, 1]
    skipped = [re.findall(r"step (\d+) skipped", log[f"stage {n} worker 0"]) for n in (0, 1)]
    assert skipped[0] == skipped[1]
    assert str(SPIKE) in skipped[0]
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


def test_a_job_that_diverges_says_so_and_keeps_the_model_of_the_step_before(folder, client):
    job = job_of(
        folder, "diverging", ("cpu", "cpu", "v100", "v100"), 1, "model.entry=bomb.py:build"
    )
    status = client.wait(client.submit(job), timeout=300)
    assert (status.state, status.end_reason) == ("failed", "diverged"), status.reason
    assert "step 6: a loss or gradient is not finite" in status.reason
    assert not status.metrics
    with open(Path(status.output) / "loss.csv") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 6
    assert np.isfinite(losses).all()
    assert all(p.isfinite().all() for p in heterps.load(status.output).parameters())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not two GPUs, or a torch without CUDA")
def test_two_gpus_share_out_experts(folder, plain, tmp_path):
    with (
        Cluster(tmp_path, types={"cpu": 3, "v100": 2}, devices={"v100": "cuda"}) as gpus,
        Client(gpus.address) as client,
    ):
        job = job_of(folder, "gpus", ("cpu", "cpu", "v100", "cpu"), 2, "train.split_experts=true")
        status, log, losses = run(client, job)
        assert units(client, status) == [1, 2, 1]
    assert "are split over 2 workers" in log["stage 1 worker 1"]
    assert losses == pytest.approx(plain[2], rel=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or a torch without CUDA")
@pytest.mark.parametrize("place", ["gpu", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_flights_trains_on_a_gpu(tmp_path, place, precision):
    """All of it, or all but the embeddings."""
    resources = tmp_path / "resources.yaml"
    resources.write_text(
        "types:\n"
        "  - {name: cpu, price_per_hour: 0.04, limit: 4, memory_bytes: 4.0e9, device: cpu}\n"
        "  - {name: gpu, price_per_hour: 1.0, limit: 1, memory_bytes: 8.0e9, device: cuda}\n"
    )
    pins = {"embedding": place, "wide": place, "tower": "gpu", "experts": "gpu", "head": "gpu"}
    job = load_job(
        ROOT / "examples/flights/job.yaml",
        [
            f"output={tmp_path}/out",
            f"schedule.resources={resources}",
            f"train.precision={precision}",
            *(f"schedule.pin.{layer}={kind}" for layer, kind in pins.items()),
        ],
    )
    with (
        Cluster(tmp_path / "cluster", types={"cpu": 2, "gpu": 1}, devices={"gpu": "cuda"}) as small,
        Client(small.address) as client,
    ):
        status = client.wait(client.submit(job), timeout=400)
        assert status.state == "succeeded", status.reason
        log = "".join(logs_of(client, status).values())
        assert f"in {precision} on cuda:0" in log
        decision = client.decision_message(status.job_id)
    assert decision.stages[-1].type == "gpu"
    assert not decision.measured.emulated
    assert status.metrics["test_auc"] >= 0.82
    model = heterps.load(status.output)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
