"""Measures each layer of a job's model on this machine and writes down a `Workload`.

Every layer runs alone, forward and backward, on real batches, on one unit; embedding rows come
from a real shard that is started for the purpose. Timing a batch and half a batch separates the
part that shrinks with data parallelism from the part that does not.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice

import torch
from torch import Tensor, nn

from protos.decision_pb2 import Layer, LayerCost, Resources, ResourceType, Workload
from protos.job_pb2 import JobSpec
from ps import LocalShards, ParameterClient
from ps import _native as native
from workers import datasheet
from workers.data import Batch, Dataset
from workers.executor import make_optimizer
from workers.layers.sparse_embedding import SparseEmbedding
from workers.model import job_model
from workers.rows import tables_of
from workers.source import tensors_of
from workers.trace import LayerInfo, StageGraph, TracedModel
from workers.transport import measure_rate

MAX_BATCH = 2048
WARMUP = 2
REPEATS = 7
_ROW_STATE = 2  # a row and its optimizer state, in units of the row
_PUSH_AND_PULL = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one layer on one batch."""

    compute_s: float
    sync_s: float


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer as measured here."""

    info: LayerInfo
    cost: LayerCost
    work: datasheet.Work


class Profiler:
    """Profiles one job on this machine's type.

    Args:
        here: the resource type of this node; estimated like an absent one where it is emulated.
        others: types to estimate from their data sheets.
        log: told what is being done.
    """

    def __init__(
        self,
        job: JobSpec,
        here: ResourceType,
        others: list[ResourceType],
        log: Callable[[str], None],
    ) -> None:
        self._job = job
        self._here = here
        self._estimated = [*others, here] if here.emulated else others
        self._log = log
        self._device = torch.device(
            "cuda" if here.device == "cuda" and torch.cuda.is_available() else "cpu"
        )
        self._model = job_model(job).to(self._device).train()
        self._traced = TracedModel(self._model)
        self._dataset = Dataset(job.data, "train", job.directory)
        self._batch = max(2, min(MAX_BATCH, job.train.batch_size, self._dataset.rows))

    def run(self, resources: Resources) -> Workload:
        """Measure every layer; the workload with a cost for this type and for the others."""
        batches = self._batches(WARMUP + REPEATS)
        read_s = self._read_seconds()
        rate = measure_rate()
        self._log(f"reads {self._batch / read_s:,.0f} rows/s, passes {rate / 1e9:.2f} GB/s")
        with LocalShards(1) as shards, ParameterClient(shards.addresses) as client:
            rows = _ShardRows(self._model, client)
            profiles = []
            values = [rows.warm(dict(batch)) for batch in batches]
            for index, info in enumerate(self._traced.layers):
                profile, values = self._layer(index, info, values, rows, rate)
                profiles.append(profile)
                self._log(
                    f"{info.name} ({info.kind}): compute {profile.cost.compute_s * 1e3:.2f} ms, "
                    f"sync {profile.cost.sync_s * 1e3:.2f} ms a batch of {self._batch}"
                )
            profiles[0].cost.sync_s += read_s  # reading is communication: it overlaps computing
            ps_core_s = rows.core_seconds_per_sample
        return self._workload(resources, profiles, ps_core_s)

    def _workload(
        self, resources: Resources, profiles: list[LayerProfile], ps_core_s: float
    ) -> Workload:
        layers = []
        for profile in profiles:
            cost = {} if self._here.emulated else {self._here.name: profile.cost}
            for other in self._estimated:
                cost[other.name] = datasheet.estimate(other, profile.work, profile.cost)
            layers.append(Layer(name=profile.info.name, kind=profile.info.kind, cost=cost))
        ps_types = [t.name for t in resources.types if t.device == "cpu"]
        steps_samples = self._dataset.rows * self._job.train.epochs
        if self._job.train.max_steps:
            steps_samples = min(
                steps_samples, self._job.train.max_steps * self._job.train.batch_size
            )
        return Workload(
            name=self._job.name,
            reference_batch=self._batch,
            samples=steps_samples,
            ps_type=ps_types[0] if ps_types else self._here.name,
            ps_core_s=ps_core_s,
            layers=layers,
        )

    def _layer(
        self,
        index: int,
        info: LayerInfo,
        values: list[dict[str, Tensor]],
        rows: "_ShardRows",
        rate: float,
    ) -> tuple[LayerProfile, list[dict[str, Tensor]]]:
        graph = self._traced.stage(index, index)
        parameters = [p for p in graph.module.parameters() if p.requires_grad]
        optimizer = make_optimizer(self._job.train.optimizer, parameters)
        whole, half, after = [], [], []
        for number, batch in enumerate(values):
            sample, outputs = self._time(graph, batch, rows, optimizer)
            after.append(outputs)
            shorter = {n: t[: self._batch // 2] for n, t in batch.items()}
            shorter_sample, _ = self._time(graph, shorter, rows, optimizer)
            if number >= WARMUP:
                whole.append(sample)
                half.append(shorter_sample)
        last = index == len(self._traced.layers) - 1
        outputs = after[-1]
        crossing = [] if last else [outputs[name] for name in graph.outputs]
        moved = sum(
            t.numel() * t.element_size() * (2 if t.is_floating_point() else 1) for t in crossing
        )
        weights = sum(p.numel() * p.element_size() for p in parameters)
        activations = sum(t.numel() * t.element_size() for t in outputs.values())
        compute = statistics.median(s.compute_s for s in whole)
        sync = statistics.median(s.sync_s for s in whole)
        cost = LayerCost(
            compute_s=compute,
            # All-reduce moves about twice the weights and does not shrink with more workers.
            sync_s=sync + 2 * weights / rate,
            transfer_s=moved / rate,
            parallel_compute=_parallel(compute, statistics.median(s.compute_s for s in half)),
            parallel_sync=_parallel(sync, statistics.median(s.sync_s for s in half)) if sync else 0,
            memory_bytes=4 * weights + 2 * activations,
        )
        inputs = [values[-1][name] for name in graph.inputs]
        rows.bind(graph, values[-1])
        work = datasheet.measure_work(graph.module, inputs, list(outputs.values()))
        return LayerProfile(info, cost, work), after

    def _time(
        self,
        graph: StageGraph,
        values: dict[str, Tensor],
        rows: "_ShardRows",
        optimizer: torch.optim.Optimizer | None,
    ) -> tuple[Sample, dict[str, Tensor]]:
        inputs = []
        for name in graph.inputs:
            tensor = values[name].detach().to(self._device)
            inputs.append(tensor.requires_grad_() if tensor.is_floating_point() else tensor)
        pulled_s = rows.bind(graph, values)
        begin = self._now()
        results = graph.module(*inputs)
        made = [r for r in results if r.requires_grad and not any(r is i for i in inputs)]
        if made:
            torch.autograd.backward(made, [torch.full_like(r, 1e-6) for r in made])
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        compute_s = self._now() - begin
        pushed_s = rows.push(graph, len(values["label"]))
        outputs = dict(zip(graph.outputs, (r.detach() for r in results), strict=True))
        kept = {n: outputs.get(n, t) for n, t in values.items()}
        # Rows of the next step are pulled while gradients of the last one are pushed.
        return Sample(compute_s, max(pulled_s, pushed_s)), {**kept, **outputs}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _batches(self, wanted: int) -> list[dict[str, Tensor]]:
        return [tensors_of(b) for b in islice(cycle_batches(self._dataset, self._batch), wanted)]

    def _read_seconds(self) -> float:
        fresh = Dataset(self._job.data, "train", self._job.directory)
        begin = time.perf_counter()
        batches = sum(1 for _ in islice(cycle_batches(fresh, self._batch), 20))
        first = time.perf_counter() - begin
        begin = time.perf_counter()
        again = sum(1 for _ in islice(cycle_batches(fresh, self._batch), 20))
        later = time.perf_counter() - begin
        epochs = max(1, self._job.train.epochs)
        return (first / batches + (epochs - 1) * later / again) / epochs


class _ShardRows:
    """Rows of the model's embeddings on a real shard, with the time that moving them takes."""

    def __init__(self, model: nn.Module, client: ParameterClient) -> None:
        self._client = client
        self._samples = 0
        self._layers = {n: m for n, m in model.named_children() if isinstance(m, SparseEmbedding)}
        for spec in tables_of(self._layers.values()).values():
            client.create_table(spec.table, **spec.table_options())
        self._pulled: dict[str, tuple[Tensor, object]] = {}
        self._core_begin = self._cores()

    def warm(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Grow the batch's rows, so that growth is not what is measured."""
        for layer in self._layers.values():
            self._client.pull(layer.spec.table, batch["sparse"].numpy().reshape(-1))
        self._core_begin, self._samples = self._cores(), 0
        return batch

    def bind(self, graph: StageGraph, values: dict[str, Tensor]) -> float:
        """Pull and bind the rows of a layer's embeddings; seconds."""
        begin = time.perf_counter()
        for name, source in graph.keys_of.items():
            layer = self._layers[name]
            keys, inverse = native.unique(values[source].numpy().reshape(-1))
            rows = torch.from_numpy(self._client.pull_unique(layer.spec.table, keys))
            self._pulled[name] = (rows.requires_grad_(), keys)
            layer.bind(rows, torch.from_numpy(inverse))
        return time.perf_counter() - begin if graph.keys_of else 0.0

    def push(self, graph: StageGraph, samples: int) -> float:
        """Push what the rows collected; seconds."""
        begin = time.perf_counter()
        for name in graph.keys_of:
            rows, keys = self._pulled.pop(name)
            if rows.grad is not None:
                self._client.push(self._layers[name].spec.table, keys, rows.grad.numpy())
            self._samples += samples
        return time.perf_counter() - begin if graph.keys_of else 0.0

    @property
    def core_seconds_per_sample(self) -> float:
        """Server core seconds that one sample costs, over all embeddings."""
        if not self._layers or not self._samples:
            return 0.0
        per_layer_sample = (self._cores() - self._core_begin) / self._samples
        return max(0.0, per_layer_sample) * len(self._layers)

    def _cores(self) -> float:
        return sum(s.cpu_seconds for s in self._client.stats())


def cycle_batches(dataset: Dataset, size: int) -> Iterator[Batch]:
    """Batches without end."""
    for epoch in count():
        yield from dataset.batches(size, seed=0, epoch=epoch, shuffle=True, drop_last=True)


def _parallel(whole_s: float, half_s: float) -> float:
    """The share of a batch's time that shrinks with its size."""
    return min(1.0, max(0.05, 2.0 * (whole_s - half_s) / whole_s)) if whole_s > 0 else 1.0
