"""Profiling real, small models on the CPU: alone and with several workers at once."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chassis.bounded_log import BoundedLog
from chassis.exits import TOLD
from chassis.forking import ForkServer
from protos.decision_pb2 import LinearRoute, Resources, Workload
from protos.job_pb2 import JobSpec
from protos.node_pb2 import ProfileRequest
from tests.rounds import more
from workers.device.units import compute_environment
from workers.model.code.entry import ModelError
from workers.ops.linear import available
from workers.profiling.profiler import Profiler

pytest.importorskip("ps.server")

Run = Callable[..., tuple[int, Workload, str]]
Measured = Callable[..., tuple[Workload, str]]

MODEL = """
import time

import torch
from torch import nn
from heterps import MoE, SparseEmbedding

class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.rows = SparseEmbedding("rows", 8)
        self.small = nn.Linear(3 * 8 + 2, 8)
        self.large = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, 1)

    def forward(self, sparse, dense):
        x = torch.cat([self.rows(sparse).flatten(1), dense], dim=1)
        return self.head(self.large(self.small(x))).squeeze(1)


class FirstOf(nn.Module):
    def forward(self, several):
        return several[0]


class Shares(nn.Module):
    # Two layers of one weight, a layer that is called twice, and one table of two columns; layers
    # that hand on a state, and one that changes what it is given.

    def __init__(self):
        super().__init__()
        self.rows = SparseEmbedding("rows", 8)
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10, bias=False)
        self.second.weight = self.first.weight
        self.act = nn.ReLU(inplace=True)
        self.encoder, self.decoder = nn.LSTM(10, 4), nn.LSTM(10, 4)
        self.first_of, self.head = FirstOf(), nn.Linear(14, 1)

    def forward(self, sparse, dense):
        rows = self.rows(sparse[:, :1]).flatten(1) + self.rows(sparse[:, 1:2]).flatten(1)
        x = self.second(self.act(self.first(torch.cat([rows, dense], dim=1))))
        x = self.act(self.first(x))
        _, state = self.encoder(x)
        out = self.first_of(self.decoder(x, state))
        return self.head(torch.cat([x, out], 1)).view(sparse.shape[0])


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.small = nn.Sequential(nn.Linear(26, 8), nn.BatchNorm1d(8))


class Mixed(Net):
    def __init__(self):
        super().__init__(8)
        self.large = MoE(8, 4, 1024, k=1, shadow=False, seed=0)


def late(scores, batch):
    time.sleep(0.01)
    return torch.nn.functional.mse_loss(scores, batch["label"])
"""


@pytest.fixture(scope="module")
def request_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    (folder / "model.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    rows = 4096
    columns = {f"s{i}": rng.integers(0, 500, rows) for i in range(3)}
    columns |= {f"d{i}": rng.standard_normal(rows, dtype=np.float32) for i in range(2)}
    columns["label"] = rng.integers(0, 2, rows).astype(np.float32)
    pq.write_table(pa.table(columns), folder / "train.parquet")
    job = JobSpec(name="net", directory=str(folder))
    job.model.entry = "model.py:Net"
    job.data.path, job.data.train, job.data.label = ".", "train.parquet", "label"
    job.data.sparse.extend(["s0", "s1", "s2"])
    job.data.dense.extend(["d0", "d1"])
    job.train.batch_size, job.train.epochs = 512, 2
    job.train.optimizer.name, job.train.optimizer.learning_rate = "adam", 1e-3
    resources = Resources()
    for name, device in (("cpu", "cpu"), ("h200", "cuda")):
        resources.types.add(name=name, device=device, price_per_hour=1.0, limit=8)
    path = folder / "request"
    request = ProfileRequest(job_id="job", job=job, resources=resources)
    path.write_bytes(request.SerializeToString())
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Profile as a node does; the exit code, the workload, and what was said."""
    folder = tmp_path_factory.mktemp("profiles")
    server = ForkServer("workers.forked", folder, compute_environment())
    numbers = count()

    def profile(request_file: Path, *arguments: str) -> tuple[int, Workload, str]:
        label = f"profile-{next(numbers)}"
        result, log = folder / f"{label}.workload", BoundedLog(folder / f"{label}.log")
        files = ["--request", str(request_file), "--result", str(result)]
        child = server.spawn(
            label,
            "workers.profiling.__main__",
            [*files, *arguments],
            directory=folder,
            environment=compute_environment(),
            log=log,
        )
        try:
            code = child.process.wait(120)
            child.poll()  # by then its log is whole
        finally:
            child.stop()
        found = Workload.FromString(result.read_bytes()) if result.exists() else Workload()
        return code, found, log.path.read_text() if log.path.exists() else ""

    yield profile
    server.close()


@pytest.fixture(scope="module")
def measured(run: Run) -> Measured:
    def profile(request_file: Path, *arguments: str) -> tuple[Workload, str]:
        code, workload, said = run(request_file, *arguments)
        assert code == 0, said
        return workload, said

    return profile


@pytest.fixture(scope="module")
def alone(request_file: Path, measured: Measured) -> Workload:
    return measured(request_file, "--type", "cpu", "--batch", "512")[0]


def check(workload: Workload, batch: int) -> None:
    assert [layer.name for layer in workload.layers] == ["rows", "small", "large", "head"]
    assert workload.reference_batch == batch
    assert workload.samples == 8192
    assert workload.ps_type == "cpu"
    assert workload.ps_core_s > 0
    for layer in workload.layers:
        here, there = layer.cost["cpu"], layer.cost["h200"]
        assert (here.estimated, there.estimated) == (False, True)
        for cost in (here, there):
            assert cost.compute_s > 0
            assert 0 <= cost.parallel_compute <= 1
            assert 0 <= cost.parallel_sync <= 1
            assert 0 < cost.forward_share < 1
        assert 0 < here.uncertainty < 10
        assert there.uncertainty >= 0.5


def test_a_type_that_does_not_compute_in_the_jobs_precision_gets_no_costs(
    request_file: Path,
) -> None:
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.job.train.precision = "bf16"
    for name, emulated in (("t4", False), ("v100", True)):
        request.resources.types.add(name=name, device="cuda", limit=1, emulated=emulated)
    said: list[str] = []
    profiler = Profiler(request, "cpu", said.append)
    assert [kind.name for kind in profiler._estimated] == ["h200", "v100"]
    assert said == ["t4: does not compute in bf16, so no layer may run there"]


def test_a_model_that_is_only_looked_at_tells_its_layers_and_has_no_costs(
    request_file: Path, measured: Measured, tmp_path: Path
) -> None:
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.unmeasured, request.job.train.micro_batches = True, 3
    asked = tmp_path / "request"
    asked.write_bytes(request.SerializeToString())
    found, _ = measured(asked, "--type", "cpu")
    names = ["rows", "small", "large", "head"]
    assert [(one.name, one.uncut, len(one.cost)) for one in found.layers] == [
        (name, False, 0) for name in names
    ]
    assert found.layers[0].kind == "embedding"
    assert found.micro_batches == 3


@pytest.mark.exhaustive
def test_experts_out_of_memory_are_measured_there(
    request_file: Path, measured: Measured, tmp_path: Path
) -> None:
    """They are on the disk of types of cores, and of memory they have what the job says."""
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.job.model.entry, request.job.train.staleness = "model.py:Mixed", 0
    asked, disk = tmp_path / "request", tmp_path / "disk"
    found = []
    for memory in ("", "900kB"):  # one that updates, and one or two that stay
        request.job.train.offload.memory, request.job.train.offload.path = memory, str(disk)
        asked.write_bytes(request.SerializeToString())
        found.append(measured(asked, "--type", "cpu", "--batch", "128")[0])
    resident, outside = ({one.name: one for one in each.layers} for each in found)
    assert resident.keys() == outside.keys()
    weights = 4 * (8 * 1024 + 1024 * 8) * 4  # bytes of all experts'
    mixed = outside["large"]
    assert mixed.kind == "moe"
    assert resident["large"].weight_bytes - mixed.weight_bytes == weights
    assert mixed.weight_bytes < 1000, "its gate"
    assert mixed.optimizer_bytes - 900_000 == pytest.approx(2 * mixed.weight_bytes, abs=100)
    assert mixed.disk_bytes == pytest.approx(4 * weights, rel=0.1), "two of Adam's, and gradients"
    assert mixed.cost.keys() == {"cpu"}
    assert not mixed.cost["cpu"].estimated
    assert mixed.cost["cpu"].compute_s > 0
    assert all(not one.disk_bytes for one in resident.values())
    assert all(not one.disk_bytes for name, one in outside.items() if name != "large")
    assert all({*one.cost} == {"cpu", "h200"} for name, one in outside.items() if name != "large")
    assert not [*disk.iterdir()]


@pytest.mark.parametrize("entry", ["Shares", *more("Net")])
def test_a_model_that_one_unit_cannot_train_is_measured_by_runs(
    request_file: Path, measured: Measured, tmp_path: Path, entry: str
) -> None:
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.job.model.entry = f"model.py:{entry}"
    asked, counted = tmp_path / "request", []
    for memory in (0.0, 2e3):
        for kind in request.resources.types:
            kind.memory_bytes = memory
        asked.write_bytes(request.SerializeToString())
        found, said = measured(asked, "--type", "cpu", "--units", "2")
        assert ("no whole steps" in said) == (memory > 0)
        assert all(layer.cost["cpu"].compute_s > 0 for layer in found.layers)
        counted.append(
            [
                (layer.name, layer.weight_bytes, layer.optimizer_bytes, layer.uncut)
                for layer in found.layers
            ]
        )
    assert counted[0] == counted[1]


def test_what_layers_share_is_measured_in_each_and_counted_once(
    request_file: Path, measured: Measured, tmp_path: Path
) -> None:
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.job.model.entry = "model.py:Shares"
    asked = tmp_path / "request"
    asked.write_bytes(request.SerializeToString())
    found, _ = measured(asked, "--type", "cpu")
    assert all(layer.cost["cpu"].compute_s > 0 for layer in found.layers)
    shared = [layer.name for layer in found.layers if layer.uncut]
    assert shared[0] == "rows"
    assert {"first", "second", "encoder", "decoder"} <= set(shared)
    assert not {"first_of", "head"} & set(shared)
    lstm = 4 * 4 * (10 + 4 + 2)
    assert sum(layer.weight_bytes for layer in found.layers) == 4 * (100 + 10 + 2 * lstm + 14 + 1)


def test_a_last_batch_that_cannot_be_normalised_is_told_before_anything_is_measured(
    request_file: Path,
) -> None:
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.job.model.entry, request.job.train.batch_size = "model.py:Normed", 819  # of 4096
    with pytest.raises(ModelError, match=r"'small.1' cannot normalise .*drop_last: true"):
        Profiler(request, "cpu", print)


def test_every_layer_is_measured_here_and_estimated_elsewhere(alone: Workload) -> None:
    check(alone, 512)
    rows, small, large, head = (layer.cost["cpu"] for layer in alone.layers)
    assert rows.sync_s > small.sync_s  # rows come from a shard
    assert large.sync_s > small.sync_s  # more weights to reduce
    assert large.compute_s > small.compute_s
    assert head.transfer_s == 0  # nothing leaves the last layer
    assert large.transfer_s > small.transfer_s  # wider
    # The wide layer does 256 times the arithmetic of the head.
    assert alone.layers[2].cost["h200"].compute_s > alone.layers[3].cost["h200"].compute_s


def test_memory_counts_weights_state_and_activations(alone: Workload) -> None:
    weights = 4 * (8 * 256 + 256 + 256 * 256 + 256)
    memory = alone.layers[2].cost["cpu"].memory_bytes
    # Adam's two moments, gradient, reduction buffer and itself; then what autograd keeps.
    kept = 4 * 512 * 256
    assert 5 * weights + 2 * kept <= memory <= 5 * weights + 6 * kept + 4 * 512 * 8 + 1000


def test_a_profile_says_what_memory_is_made_of_and_what_crosses(alone: Workload) -> None:
    rows, small, large, head = alone.layers
    width = 4 * 256
    assert [layer.weight_bytes for layer in (rows, small, head)] == [0, 4 * (26 * 8 + 8), width + 4]
    assert large.weight_bytes == 4 * (8 * 256 + 256) + 256 * width + width
    for layer in (small, large, head):  # Adam's two moments, and its steps
        assert 0 <= layer.optimizer_bytes - 2 * layer.weight_bytes < 100
    # Its input, what ReLU keeps, and nothing of the weights.
    assert large.activation_bytes == 4 * 8 + width
    assert head.activation_bytes == width + 4 + 4  # and the scores and labels of the loss
    # Three slots of eight floats; the dense inputs and the label travel on.
    assert rows.output_bytes >= 4 * (3 * 8 + 2 + 1)
    assert large.output_bytes == width + 4
    assert head.output_bytes == head.passing_s == 0
    assert large.passing_s == pytest.approx(width / (4 * 8) * small.passing_s)
    assert not any(layer.uncut or layer.one_host for layer in alone.layers)


def test_a_profile_says_what_a_step_is(
    alone: Workload, measured: Measured, request_file: Path
) -> None:
    assert (alone.batch, alone.micro_batches, alone.staleness) == (512, 0, 0)
    assert alone.HasField("staleness")
    assert alone.data_bytes >= 4096 * (3 * 8 + 2 * 4 + 4)
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.job.train.micro_batches, request.job.train.staleness = 3, 2
    request.job.model.loss = "model.py:late"
    file = request_file.with_name("request-fixed")
    file.write_bytes(request.SerializeToString())
    fixed, log = measured(file, "--type", "cpu")
    assert (fixed.micro_batches, fixed.staleness) == (3, 2)
    assert fixed.reference_batch == 171  # the largest of 512 samples in three parts
    assert "micro-batches of 171 samples, the job's" in log
    assert fixed.layers[3].cost["cpu"].compute_s >= 0.01, "the last layer has the loss"


def test_where_the_job_leaves_micro_batches_open_the_smallest_worth_having_is_measured(
    request_file: Path, measured: Measured
) -> None:
    workload, log = measured(request_file, "--type", "cpu")
    assert workload.micro_batches == 0
    assert 512 % workload.reference_batch == 0
    assert f"in micro-batches of {workload.reference_batch}" in log  # it was tried


def test_what_a_micro_batch_of_any_size_takes_is_told_of_each_layer(
    request_file: Path, measured: Measured
) -> None:
    """The last layer's loss sleeps for 10 ms, of one sample as of all."""
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.job.model.loss = "model.py:late"
    file = request_file.with_name("request-late")
    file.write_bytes(request.SerializeToString())
    workload, _ = measured(file, "--type", "cpu")
    *before, last = (layer.cost["cpu"] for layer in workload.layers)
    assert 0.009 <= last.fixed_s <= 0.05
    assert sum(cost.fixed_s for cost in before) < last.fixed_s
    assert all(0 <= cost.fixed_s <= 2 * cost.compute_s for cost in before)
    assert workload.layers[-1].cost["h200"].fixed_s == last.fixed_s


def test_what_computes_linear_layers_is_chosen_once_and_timed_as_it_will_run(
    request_file: Path, measured: Measured, alone: Workload, tmp_path: Path
) -> None:
    assert not alone.linear  # the job leaves it to torch
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.job.train.linear = "auto"
    asked = tmp_path / "request"
    asked.write_bytes(request.SerializeToString())
    workload, log = measured(asked, "--type", "cpu", "--batch", "512")
    # The others of the model are too small to be told apart.
    (one,) = [one for one in workload.linear if one.rows == 512]
    assert (one.type, one.inputs, one.outputs, one.threads) == ("cpu", 256, 256, 1)
    assert {one.forward, one.grad_input, one.grad_weight} <= set(available())
    assert "linear 256 -> 256, 512 rows" in log
    flops = [layer.cost["h200"].compute_s for layer in workload.layers]
    plain = [layer.cost["h200"].compute_s for layer in alone.layers]
    assert flops == pytest.approx(plain, rel=0.5)  # arithmetic is counted on every route
    route = available()[-1]
    kept = LinearRoute(
        type="cpu", rows=512, inputs=256, outputs=256, threads=1, forward=route, grad_input=route
    )
    kept.grad_weight = route
    request.job.train.routes.append(kept)
    asked.write_bytes(request.SerializeToString())
    again, log = measured(asked, "--type", "cpu", "--units", "2", "--batch", "256")
    assert list(again.linear) == [kept]
    assert "linear 256" not in log


@pytest.mark.exhaustive
def test_several_workers_are_measured_at_once(request_file: Path, measured: Measured) -> None:
    options = ("--units", "2", "--batch", "256", "--bytes-per-s", "1e7")
    workload, log = measured(request_file, "--type", "cpu", *options)
    check(workload, 256)
    assert "measured 2 workers at once" in log
    # The stated network bounds what crosses between hosts: 256 rows of 256 floats, both ways.
    crossing = 2 * 256 * 256 * 4
    assert workload.layers[2].cost["cpu"].transfer_s == pytest.approx(crossing / 1e7)


def test_layers_are_measured_in_the_precision_of_the_job(
    request_file: Path, measured: Measured
) -> None:
    request = ProfileRequest.FromString(request_file.read_bytes())
    request.job.train.precision = "bf16"
    file = request_file.with_name("request-bf16")
    file.write_bytes(request.SerializeToString())
    workload, _ = measured(file, "--type", "cpu", "--batch", "256", "--bytes-per-s", "1e7")
    check(workload, 256)
    # What crosses is half as wide.
    assert workload.layers[2].cost["cpu"].transfer_s == pytest.approx(2 * 256 * 256 * 2 / 1e7)


def test_a_type_that_is_not_listed_is_refused(request_file: Path, run: Run) -> None:
    code, _, said = run(request_file, "--type", "abacus")
    assert code == TOLD
    assert said.splitlines()[-1] == (
        "ValueError: resources: this node is of type 'abacus'; expected one of cpu, h200"
    )
