"""Measures each layer of a job's model on this machine and writes down a `Workload`.

Every layer runs alone, forward and backward, on real batches; embedding rows come from a real
shard that is started for the purpose. A unit is one data-parallel worker with its share of the
batch. As many units as are lent run at once, as they would in a step; for more of them one runs
a smaller share alone, slowed as much as the largest group that could run was.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.decision_pb2 import Layer, LayerCost, Resources, ResourceType, Workload
from protos.node_pb2 import ProfileRequest
from ps import LocalShards, ParameterClient
from workers.data import Dataset
from workers.learning.precision import Precision
from workers.links.transport import measure_rate
from workers.model.entry import job_model
from workers.model.trace import TracedModel
from workers.profiling import datasheet
from workers.profiling.catalogue import with_data_sheet
from workers.profiling.memory import layer_memory
from workers.profiling.peers import Peers
from workers.profiling.reading import Reading, cycle_batches, time_reading
from workers.profiling.rows import ShardRows
from workers.profiling.scaling import Scaling, combined, fit_scaling
from workers.profiling.timing import LayerTimer, Part, share_of
from workers.stage.source import tensors_of

MAX_BATCH = 2048
WARMUP = 2
REPEATS = (3, 15)  # least and most, within the time below
PHASE_S = 4.0  # that measuring one number of units may take
SHARES = (1, 2, 4, 8)  # numbers of units that are measured or imitated

_Timings = dict[int, NDArray[np.float64]]  # units -> seconds [repeats, layers, parts]


@dataclass(frozen=True, slots=True)
class _Rates:
    """What layers have in common."""

    bytes_per_s: float
    reading: Reading
    reduce_s: float  # of all dense gradients, however many workers
    dense_bytes: int


class Profiler:
    """Profiles one job on this machine's type.

    Args:
        request: the job and the types to give costs for.
        kind: name of the type that this machine is of; estimated, as an absent one is, where it
            is emulated.
        units: how many workers may run here at once.
        batch: the reference batch; 0 for the job's, up to `MAX_BATCH`.
        bytes_per_s: of the network between hosts; 0 for what loopback does here.
        log: told what is being done.

    Raises:
        ValueError: the resources do not list `kind`.
    """

    def __init__(
        self,
        request: ProfileRequest,
        kind: str,
        log: Callable[[str], None],
        *,
        units: int = 1,
        batch: int = 0,
        bytes_per_s: float = 0.0,
    ) -> None:
        types = {t.name: with_data_sheet(t) for t in request.resources.types}
        if kind not in types:
            raise ValueError(
                f"resources: this node is of type {kind!r}; expected one of {', '.join(types)}"
            )
        self._request = request
        self._job = request.job
        self._here = types[kind]
        self._estimated = [t for t in types.values() if t.name != kind or t.emulated]
        self._log = log
        self._stated_rate = bytes_per_s
        wants_gpu = self._here.device == "cuda" and not self._here.emulated
        cuda = wants_gpu and torch.cuda.is_available()
        self._device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        self._units = min(units, torch.cuda.device_count()) if cuda else units
        self._precision = Precision.of(self._job.train.precision, self._device)
        # Building the model first: most mistakes are in it, and it is what is quick to check.
        self._traced = TracedModel(job_model(self._job).to(self._device).train())
        self._dataset = Dataset.of(self._job, "train")
        wanted = batch or min(MAX_BATCH, self._job.train.batch_size)
        self._batch = max(2, min(wanted, self._dataset.rows))

    def run(self) -> Workload:
        """Measure every layer; the workload with a cost for each type."""
        together = [k for k in SHARES if 1 < k <= self._units]
        if self._units > 1 and self._units not in together:
            together.append(self._units)
        with ExitStack() as stack:
            peers = self._start_peers(stack, max(together, default=1))
            batches = list(islice(self._batches(self._dataset), WARMUP + REPEATS[1]))
            reading = time_reading(self._job, self._batch, self._samples())
            rate = measure_rate()
            self._log(f"reads {self._batch / reading.batch_s:,.0f} rows/s, {rate / 1e9:.2f} GB/s")
            shards = stack.enter_context(LocalShards(1))
            client = stack.enter_context(ParameterClient(shards.addresses))
            rows = ShardRows(self._traced.model, client, self._device, create=True)
            timer = LayerTimer(
                self._traced, self._job.train.optimizer, rows, self._device, self._precision
            )
            for batch in batches:
                for graph in timer.graphs:
                    rows.warm(graph, batch)
            if peers is not None:
                peers.begin(batches, shards.addresses[0], together)
            begun = rows.server_seconds()
            timings, samples = self._time_alone(timer, batches)
            ps_core_s = max(0.0, rows.server_seconds() - begun) / samples
            reduce_s = self._time_together(peers, timer, batches, together, timings)
            works, memories = self._inspect(timer, batches[0], rows)
        dense = sum(p.nbytes for own in timer.parameters for p in own)
        bytes_per_s = min(rate, self._stated_rate) if self._stated_rate else rate
        # An all-reduce moves about twice the weights, however many workers; once a step, of
        # which the reference batch may be a part.
        reduce_s = max(reduce_s, 2 * dense / bytes_per_s)
        reduce_s *= self._batch / max(self._batch, self._job.train.batch_size)
        rates = _Rates(bytes_per_s, reading, reduce_s, dense)
        works = [replace(w, handling=_handling(i, timings, rates)) for i, w in enumerate(works)]
        costs = [
            self._cost(index, timings, works[index], memories[index], timer, rates)
            for index in range(len(works))
        ]
        busy_s = np.median(timings[1], axis=0)[:, Part.COMPUTE]
        uncertainty = datasheet.misses(self._here, works, busy_s.tolist())
        uncertainty = max(uncertainty, datasheet.LEAST_UNCERTAINTY)
        return self._workload(costs, works, ps_core_s, uncertainty)

    def _start_peers(self, stack: ExitStack, units: int) -> Peers | None:
        if units < 2:
            return None
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heterps-")))
        request = directory / "request"
        request.write_bytes(self._request.SerializeToString())
        return stack.enter_context(Peers(units - 1, request, directory, self._device))

    def _time_alone(
        self, timer: LayerTimer, batches: list[dict[str, Tensor]]
    ) -> tuple[_Timings, int]:
        """One worker on the whole batch and on shares of it; how many samples that were."""
        timer.time(batches[:WARMUP])
        begin = time.perf_counter()
        timer.time(batches[:1])
        took = time.perf_counter() - begin
        repeats = min(max(int(PHASE_S / took), REPEATS[0]), REPEATS[1])
        counts = sorted({k for k in (*SHARES, self._units) if k <= self._batch // 2 or k == 1})
        done = self._batch * (WARMUP + 1)
        timings: _Timings = {}
        for units in counts:
            shares = [share_of(batch, 0, units) for batch in batches[:repeats]]
            timings[units] = timer.time(shares)
            done += sum(len(share["label"]) for share in shares)
            self._log(f"measured 1 worker on 1/{units} of a batch, {repeats} times")
        return timings, done

    def _time_together(
        self,
        peers: Peers | None,
        timer: LayerTimer,
        batches: list[dict[str, Tensor]],
        together: list[int],
        timings: _Timings,
    ) -> float:
        """Put what groups of workers take into `timings`; seconds of their all-reduce."""
        if peers is None:
            return 0.0
        reduce_s, slowdown = 0.0, np.ones(1)
        repeats = len(timings[1])
        for units in together:
            alone = np.median(timings[units], axis=0)
            seconds, reduced = peers.time(timer, batches[: repeats + 1], units)
            timings[units] = seconds[1:]  # the first run connects the group
            slowdown = np.maximum(1.0, np.median(seconds[1:], axis=0) / np.maximum(alone, 1e-9))
            # A ring moves (k - 1) / k of what it moves among many.
            reduce_s = max(reduce_s, float(np.median(reduced[1:])) * units / (units - 1))
            self._log(f"measured {units} workers at once, {repeats} times")
        for units in [k for k in timings if k > max(together)]:
            timings[units] = timings[units] * slowdown
        return reduce_s

    def _inspect(
        self, timer: LayerTimer, batch: dict[str, Tensor], rows: ShardRows
    ) -> tuple[list[datasheet.Work], list[float]]:
        """Count each layer's work and memory, on one batch."""
        works, memories = [], []
        values = dict(batch)
        for index, graph in enumerate(timer.graphs):
            rows.bind(graph, values)
            moved = rows.bytes_moved(graph)
            inputs = [values[name].to(self._device) for name in graph.inputs]
            memory, outputs = layer_memory(timer, index, values, moved)
            last = index == len(timer.graphs) - 1
            crossing = 0 if last else sum(_both_ways(values[name]) for name in graph.outputs)
            rows.push(graph)
            rows.bind(graph, values)
            with self._precision.computing():  # the inputs are what the layers before gave in it
                counted = datasheet.measure_work(graph.module, inputs, outputs)
            rows.push(graph)
            works.append(datasheet.Work(*counted, 2.0 * moved, crossing))
            memories.append(memory)
        return works, memories

    def _cost(
        self,
        index: int,
        timings: _Timings,
        work: datasheet.Work,
        memory: float,
        timer: LayerTimer,
        rates: _Rates,
    ) -> LayerCost:
        own = {units: seconds[:, index] for units, seconds in timings.items()}
        # Rows of the next step are pulled while gradients of the last one are pushed.
        rows = {k: np.maximum(s[:, Part.PULL], s[:, Part.PUSH]) for k, s in own.items()}
        compute = [fit_scaling({k: s[:, Part.COMPUTE] for k, s in own.items()})]
        if self._device.type == "cpu":  # handling overlaps computing, but not on the only core
            compute.append(work.handling)
        weights = sum(p.nbytes for p in timer.parameters[index])
        reduce_s = rates.reduce_s * weights / rates.dense_bytes if weights else 0.0
        sync = [fit_scaling(rows), Scaling(reduce_s, 0.0)]
        if index == 0:
            sync.append(rates.reading.scaling)
        computing, syncing = combined(compute), combined(sync)
        info = self._traced.layers[index]
        self._log(
            f"{info.name} ({info.kind}): compute {computing.seconds * 1e3:.2f} ms "
            f"({computing.parallel:.0%} parallel), sync {syncing.seconds * 1e3:.2f} ms "
            f"a batch of {self._batch}"
        )
        return LayerCost(
            compute_s=computing.seconds,
            sync_s=syncing.seconds,
            transfer_s=work.crossing_bytes / rates.bytes_per_s,
            parallel_compute=computing.parallel,
            parallel_sync=syncing.parallel,
            memory_bytes=memory,
            uncertainty=combined([computing, syncing]).deviation,
        )

    def _workload(
        self,
        costs: list[LayerCost],
        works: list[datasheet.Work],
        ps_core_s: float,
        uncertainty: float,
    ) -> Workload:
        layers = []
        for info, cost, work in zip(self._traced.layers, costs, works, strict=True):
            by_type = {} if self._here.emulated else {self._here.name: cost}
            for other in self._estimated:
                by_type[other.name] = datasheet.estimate(other, work, cost, uncertainty)
            layers.append(Layer(name=info.name, kind=info.kind, cost=by_type))
        return Workload(
            name=self._job.name,
            reference_batch=self._batch,
            samples=self._samples(),
            ps_type=_ps_type(self._request.resources, self._here),
            ps_core_s=ps_core_s,
            layers=layers,
        )

    def _samples(self) -> int:
        train = self._job.train
        samples: int = self._dataset.rows * max(1, train.epochs)
        return min(samples, train.max_steps * train.batch_size) if train.max_steps else samples

    def _batches(self, dataset: Dataset) -> Iterator[dict[str, Tensor]]:
        return (tensors_of(batch) for batch in cycle_batches(dataset, self._batch))


def _handling(index: int, timings: _Timings, rates: _Rates) -> Scaling:
    """Processor time that a layer takes beside computing, on the worker's core."""
    packing = fit_scaling({k: seconds[:, index, Part.HANDLING] for k, seconds in timings.items()})
    return combined([packing, rates.reading.scaling]) if index == 0 else packing


def _ps_type(resources: Resources, here: ResourceType) -> str:
    names = [kind.name for kind in resources.types if kind.device == "cpu"]
    return names[0] if names else here.name


def _both_ways(tensor: Tensor) -> int:
    """Bytes of a value that crosses to the next stage, and of its gradient coming back."""
    return tensor.nbytes * (2 if tensor.is_floating_point() else 1)
