"""Measures each layer of a job's model on this machine and writes down a `Workload`.

Every layer runs alone, forward and backward, on real batches; embedding rows come from a real
shard that is started for the purpose. A unit is one data-parallel worker, which computes
micro-batches. As many units as are lent run at once, as they would in a step; more of them are
slowed as much as the largest group that could run was. What a worker does once a step, it does
whatever the number of workers, but for rows, of which each has its share.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from protos.decision_pb2 import Layer, LayerCost, LinearRoute, Resources, ResourceType, Workload
from protos.node_pb2 import ProfileRequest
from ps import LocalShards, ParameterClient
from workers.data import Dataset, GlobalBatches
from workers.learning.precision import Precision
from workers.links.plain import plain_allowed
from workers.links.transport import measure_rate
from workers.model.chain.compiled import compile_layers
from workers.model.chain.trace import TracedModel
from workers.model.checks.graph import check_graph
from workers.model.checks.made_again import check_made_again
from workers.model.checks.probe import alone_in, check_parameters, micro_batches_of, structures_of
from workers.model.code.entry import job_model
from workers.model.module.inputs import inputs_of
from workers.model.module.whole import check_smallest
from workers.model.objective.loss import job_loss
from workers.offload.training.suited import check_suited
from workers.ops.linear import Routes, Shape, of_type
from workers.ops.routed_linear import route
from workers.profiling import datasheet, linear
from workers.profiling.against_steps import besides, drop_waits, tell_delay
from workers.profiling.catalogue import computes_in_bf16, with_data_sheet
from workers.profiling.costs import Sizes, Taken, Timings, handling, layer_cost, slowdown_of
from workers.profiling.crossing import time_crossing
from workers.profiling.look import shares_of
from workers.profiling.memory import LayerBytes, layer_bytes, runs_within, weights_of
from workers.profiling.peers import Peers
from workers.profiling.reading import micro_batches, time_reading
from workers.profiling.rows import ShardRows
from workers.profiling.sizes import MAX_SAMPLES, fixed_size, smallest_worth_having
from workers.profiling.steps import StepTimes, time_step
from workers.profiling.timing import LayerTimer, first_of, share_of, tensors_in
from workers.stage.experts.offloading import take_all_out
from workers.stage.experts.outside import built_in, folder_of, outside_of
from workers.stage.running.layers import for_losses

WARMUP = 2
REPEATS = (3, 15)  # least and most, within the time below
PHASE_S = 4.0  # that measuring one number of units may take
SHARES = (1, 2, 4, 8)  # numbers of units that are measured or imitated


class Profiler:
    """Profiles one job on this machine's type.

    Args:
        request: the job and the types to give costs for.
        kind: name of the type that this machine is of; estimated, as an absent one is, where it
            is emulated.
        units: how many workers may run here at once.
        batch: samples of a micro-batch; 0 for what a worker of the job gets.
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
        if self._job.train.precision == "bf16":
            unfit = [t for t in self._estimated if not t.emulated and not computes_in_bf16(t)]
            for one in unfit:
                self._estimated.remove(one)
                log(f"{one.name}: does not compute in bf16, so no layer may run there")
        self._stated_rate = bytes_per_s
        wants_gpu = self._here.device == "cuda" and not self._here.emulated
        cuda = wants_gpu and torch.cuda.is_available()
        self._device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        self._units = min(units, torch.cuda.device_count()) if cuda else units
        self._precision = Precision.of(self._job.train.precision, self._device)
        # Building the model first: most mistakes are in it, and it is what is quick to check.
        folder = folder_of(self._job)
        with built_in(folder):
            model = job_model(self._job)
            on_host = TracedModel(model, inputs_of(self._job.data))
        check_parameters(on_host, self._job)
        check_made_again(model, self._job)
        if folder is not None:
            check_suited(self._job, on_host.model, [layer.name for layer in on_host.layers])
        check_graph(on_host, self._job)
        structures = structures_of(on_host, self._job)
        self._fixed = micro_batches_of(self._job, on_host)
        self._alone = alone_in(on_host, self._job)
        self._runs = runs_within(
            weights_of(on_host),
            self._job.train.staleness + 1,
            self._here.memory_bytes,
            on_host=self._device.type == "cpu",
        )
        whole = on_host.model.train()
        if self._runs:
            log(
                f"{self._here.name}: one unit cannot train all layers in "
                f"{self._here.memory_bytes / 1e9:.2f} GB; they are measured in {len(self._runs)} "
                "runs, and no whole steps"
            )
        else:
            whole = whole.to(self._device)
        self._traced = TracedModel(whole, inputs_of(self._job.data))
        self._traced.keep_whole(structures)
        compile_layers(self._traced, self._job.train.compile)
        self._dataset = Dataset.of(self._job, "train")
        self._batches = GlobalBatches.of(self._job, self._dataset)
        step = self._batches.samples(0)
        if self._fixed and not self._job.train.split_experts:
            last = min(self._batches.steps_per_epoch or 1, self._batches.steps) - 1
            check_smallest(on_host.model, self._batches.samples(last) // self._fixed)
        size = min(batch or (fixed_size(step, self._fixed) if self._fixed else 0), step)
        self._sizes = Sizes(step, size, min(step, max(size, MAX_SAMPLES)))
        self._fixed_s = np.zeros(len(self._traced.layers))
        if folder is not None and self._device.type == "cpu":
            take_all_out(self._job, self._traced.model, folder)

    def run(self) -> Workload:
        """Measure every layer; the workload with a cost for each type."""
        together = [k for k in SHARES if 1 < k <= self._units]
        if self._units > 1 and self._units not in together:
            together.append(self._units)
        with ExitStack() as stack:
            peers = self._start_peers(stack, max(together, default=1))
            read = micro_batches(self._batches, self._sizes.rows)
            batches = list(islice(read, WARMUP + REPEATS[1]))
            rate = measure_rate()
            shards = stack.enter_context(LocalShards(1))
            client = stack.enter_context(ParameterClient(shards.addresses))
            rows = ShardRows(self._traced.model, client, self._device, create=True)
            timer = LayerTimer(
                self._traced,
                self._job.train.optimizer,
                rows,
                self._device,
                self._precision,
                job_loss(self._job),
                self._runs,
            )
            for batch in batches:
                for graph in timer.graphs:
                    rows.warm(graph, batch)
            routes = self._choose_routes(timer, batches[:WARMUP])
            self._choose_size(timer, batches)
            if peers is not None:
                size = self._sizes.micro_batch
                peers.begin(batches, shards.addresses[0], together, size, routes)
            reading_s = time_reading(self._batches, self._sizes.micro_batch)
            per_s = self._sizes.micro_batch / reading_s
            self._log(f"reads {per_s:,.0f} rows/s, {rate / 1e9:.2f} GB/s")
            taken = self._time(timer, peers, batches, together)
            ps_core_s = self._server_seconds(timer, batches, rows)
            works, memories = self._inspect(timer, batches[0], rows)
            dense = sum(p.nbytes for own in timer.parameters for p in own)
            step = StepTimes()
            if (outside := outside_of(self._traced.model)) is not None:
                outside.close()
            if not self._runs:
                timer.forget()
                for weight in self._traced.model.parameters():  # those of the steps take its place
                    weight.data = weight.data.new_empty(0)
                step = self._time_step(taken, shards.addresses)
            crossing = time_crossing(shards.addresses)
            self._log(
                f"to another stage and back: {crossing.seconds * 1e3:.2f} ms besides bytes, "
                f"{crossing.handling_s * 1e3:.2f} ms of each worker, and "
                f"{crossing.byte_s * 1e9:.2f} ms a megabyte"
            )
        bytes_per_s = min(rate, self._stated_rate) if self._stated_rate else rate
        taken = replace(
            taken,
            # An all-reduce moves about twice the weights, however many workers.
            reduce_s=max(taken.reduce_s, 2 * dense / bytes_per_s),
            reading_s=reading_s,
            bytes_per_s=bytes_per_s,
            dense_bytes=dense,
        )
        works = [
            replace(work, handling=handling(index, taken, self._sizes))
            for index, work in enumerate(works)
        ]
        costs = [
            self._cost(index, taken, works[index], memories[index]) for index in range(len(works))
        ]
        if self._device.type != "cpu":
            drop_waits(costs, step.seconds, self._sizes, self._log)
        once = np.array([1.0, 1.0, self._sizes.of_step])  # of a micro-batch's parts
        busy_s = np.median(taken.compute[1], axis=0) @ once
        uncertainty = datasheet.misses(self._here, works, busy_s.tolist())
        uncertainty = max(uncertainty, datasheet.LEAST_UNCERTAINTY)
        with_rows = [cost for cost, graph in zip(costs, timer.graphs, strict=True) if graph.lookups]
        tell_delay(with_rows, step.rows_s, self._sizes, self._log)
        handled_s = sum(self._beside(work.handling.seconds) for work in works)
        staleness = self._job.train.staleness
        overhead, besides_s = besides(
            costs, step.seconds, handled_s, staleness, self._sizes, self._log
        )
        if not self._fixed:  # of each micro-batch once, whatever its size
            costs[-1].fixed_s += besides_s
        workload = self._workload(costs, works, memories, ps_core_s, uncertainty, overhead)
        workload.crossing_s, workload.handling_s = crossing.seconds, crossing.handling_s
        for layer, work in zip(workload.layers, works, strict=True):
            layer.passing_s = crossing.byte_s * work.crossing_bytes / self._sizes.micro_batch
        return workload

    def _choose_routes(
        self, timer: LayerTimer, batches: list[dict[str, Tensor]]
    ) -> Sequence[LinearRoute]:
        """Settle where products of `nn.Linear` run: as before, else where it is fastest here."""
        train = self._job.train
        if train.linear != "auto" or self._device.type != "cpu" or self._here.emulated:
            return ()
        if not (kept := of_type(train.routes, self._here.name)):
            seen: list[set[Shape]] = []
            for batch in batches:
                seen.append(set())
                route(self._traced.model, Routes(seen=seen[-1]))
                timer.time([first_of(batch, self._sizes.micro_batch or self._sizes.rows)])
            kept = linear.choose(self._here.name, seen, self._log)
            train.routes.extend(kept)
        route(self._traced.model, Routes(kept))
        return kept

    def _choose_size(self, timer: LayerTimer, batches: list[dict[str, Tensor]]) -> None:
        """Settle the micro-batch where the job leaves it open."""
        if not self._sizes.micro_batch:
            most = self._sizes.rows
            worth = smallest_worth_having(timer, batches, most, self._log)
            self._sizes = replace(self._sizes, micro_batch=worth.samples)
            self._fixed_s = worth.fixed_s
        said = "the job's" if self._fixed else "the smallest worth having"
        self._log(f"micro-batches of {self._sizes.micro_batch} samples, {said}")

    def _start_peers(self, stack: ExitStack, units: int) -> Peers | None:
        if units < 2:
            return None
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heterps-")))
        request = directory / "request"
        request.write_bytes(self._request.SerializeToString())
        return stack.enter_context(Peers(units - 1, request, directory, self._device, self._runs))

    def _time(
        self,
        timer: LayerTimer,
        peers: Peers | None,
        batches: list[dict[str, Tensor]],
        together: list[int],
    ) -> Taken:
        """Time one worker alone, then groups of them."""
        parts = [first_of(batch, self._sizes.micro_batch) for batch in batches]
        timer.time(parts[:WARMUP])
        begin = time.perf_counter()
        timer.time(parts[:1])
        took = time.perf_counter() - begin
        repeats = min(max(int(PHASE_S / took), REPEATS[0]), REPEATS[1])
        compute = {1: timer.time(parts[:repeats])}
        self._log(f"measured 1 worker, {repeats} times")
        rows: Timings = {}
        for units in sorted({*SHARES, self._units}):
            if units <= self._sizes.rows // 2 or units == 1:
                shares = [share_of(batch, 0, units) for batch in batches[: repeats + 1]]
                rows[units] = timer.time_rows(shares)[1:]
        reduce_s = 0.0
        if peers is not None:
            slowdown, row_slowdown = np.ones(1), np.ones(1)
            for units in together:
                group = peers.time(timer, batches[: repeats + 1], units, self._sizes.micro_batch)
                compute[units] = group.compute[1:]  # the first run connects the group
                slowdown = slowdown_of(compute[units], compute[1])
                if units in rows:
                    row_slowdown = slowdown_of(group.rows[1:], rows[units])
                rows[units] = group.rows[1:]
                # A ring moves (k - 1) / k of what it moves among many.
                taken = float(np.median(group.reduce[1:]))
                reduce_s = max(reduce_s, taken * units / (units - 1))
                self._log(f"measured {units} workers at once, {repeats} times")
            for units in (k for k in rows if k > max(together)):
                rows[units] = rows[units] * row_slowdown
                compute[units] = compute[1] * slowdown
        return Taken(compute, rows, reduce_s, 0.0, 0.0, 0)

    def _time_step(self, taken: Taken, shards: list[str]) -> StepTimes:
        """Times of real steps on one worker."""
        once = float(np.median(taken.compute[1].sum(axis=(1, 2))))
        micro_batches = -(-self._sizes.step // self._sizes.micro_batch)
        return time_step(
            self._job,
            [layer.name for layer in self._traced.layers],
            shards,
            self._batches,
            micro_batches,
            max(once, 1e-4) * micro_batches,
            self._device.type,
            self._here.name,
        )

    def _beside(self, handling_s: float) -> float:
        """What of handling a micro-batch real steps here had done on a core beside the worker's."""
        spare = len(os.sched_getaffinity(0)) > torch.get_num_threads()
        together = self._job.train.staleness > 0 and spare
        return handling_s if together and self._device.type == "cpu" else 0.0

    def _server_seconds(
        self, timer: LayerTimer, batches: list[dict[str, Tensor]], rows: ShardRows
    ) -> float:
        """Core seconds of the shard a sample."""
        begun = rows.server_seconds()
        timer.time_rows(batches[: REPEATS[0]])
        samples = REPEATS[0] * self._sizes.rows
        return max(0.0, rows.server_seconds() - begun) / samples

    def _inspect(
        self, timer: LayerTimer, batch: dict[str, Tensor], rows: ShardRows
    ) -> tuple[list[datasheet.Work], list[LayerBytes]]:
        """Count each layer's work and memory, on one micro-batch."""
        works, memories = [], []
        values: dict[str, Any] = {**first_of(batch, self._sizes.micro_batch)}
        for index, graph in enumerate(timer.graphs):
            with timer.held(range(index, index + 1)):
                rows.bind(graph, values)
                moved = rows.bytes_moved(graph)
                inputs = [
                    tree_map_only(
                        Tensor, lambda t: t.detach().to(self._device).clone(), values[name]
                    )
                    for name in graph.inputs
                ]
                before = timer.disk_moved
                memory, outputs = layer_bytes(timer, index, values, moved)
                disk = timer.disk_moved - before
                rows.drop(graph)
                last = index == len(timer.graphs) - 1
                names = () if last else (*graph.outputs, *for_losses(values))
                forth = sum(t.nbytes for name in names for t in tensors_in(values[name]))
                given = tensors_in([values[name] for name in graph.outputs]) if names else ()
                crossing = sum(map(_both_ways, given))
                rows.bind(graph, values)
                with self._precision.computing():  # in which the layers before gave the inputs
                    counted = datasheet.measure_work(graph.module, inputs, outputs)
                rows.drop(graph)
            update_bytes = datasheet.UPDATE_TRAFFIC * memory.weights * self._sizes.of_step
            work = datasheet.Work(*counted, update_bytes, 2.0 * moved, crossing, forth)
            works.append(replace(work, disk_bytes=disk))
            memories.append(memory)
        return works, memories

    def _cost(
        self, index: int, taken: Taken, work: datasheet.Work, memory: LayerBytes
    ) -> LayerCost:
        train, on_cpu = self._job.train, self._device.type == "cpu"
        cost = layer_cost(index, taken, self._sizes, work, memory, train.staleness, on_cpu=on_cpu)
        cost.fixed_s = self._fixed_s[index]
        info = self._traced.layers[index]
        self._log(
            f"{info.name} ({info.kind}): compute {cost.compute_s * 1e3:.2f} ms "
            f"({cost.parallel_compute:.0%} parallel), sync {cost.sync_s * 1e3:.2f} ms "
            f"a micro-batch of {self._sizes.micro_batch}"
        )
        return cost

    def _workload(
        self,
        costs: list[LayerCost],
        works: list[datasheet.Work],
        memories: list[LayerBytes],
        ps_core_s: float,
        uncertainty: float,
        overhead: float,
    ) -> Workload:
        size, train = self._sizes.micro_batch, self._job.train
        layers = []
        names = [info.name for info in self._traced.layers]
        for index, (info, cost, work, memory) in enumerate(
            zip(self._traced.layers, costs, works, memories, strict=True)
        ):
            # Experts out of memory are trained on cores.
            outside = bool(train.offload.memory) and info.kind == "moe"
            types = [t for t in self._estimated if not (outside and _is_gpu(t))]
            able = not self._here.emulated and not (outside and _is_gpu(self._here))
            by_type = {self._here.name: cost} if able else {}
            for other in types:
                by_type[other.name] = datasheet.estimate(other, work, cost, uncertainty)
            layers.append(
                Layer(
                    name=info.name,
                    kind=info.kind,
                    cost=by_type,
                    weight_bytes=memory.weights,
                    optimizer_bytes=memory.optimizer,
                    activation_bytes=memory.activations / size,
                    output_bytes=work.forth_bytes / size,
                    uncut=self._traced.uncut[index],
                    alone=info.name in self._alone,
                    shares=shares_of(self._traced.sharing, names, index),
                    disk_bytes=memory.disk,
                    one_host=train.split_experts and info.kind == "moe" and not plain_allowed(),
                )
            )
        rows = self._dataset.rows if self._dataset.is_countable else 0
        kept = rows if self._dataset.fits(rows) else self._dataset.window_rows
        return Workload(
            name=self._job.name,
            reference_batch=size,
            samples=self._batches.total,
            ps_type=_ps_type(self._request.resources, self._here),
            ps_core_s=ps_core_s,
            layers=layers,
            micro_batches=self._fixed,
            staleness=train.staleness,
            batch=self._sizes.step,
            overhead=overhead,
            data_bytes=kept * self._dataset.row_bytes,
            whole_batch=job_loss(self._job).whole,
            lockstep=train.split_experts,
            linear=of_type(train.routes, self._here.name),
            threads={t.name: t.threads for t in (self._here, *self._estimated) if t.threads > 1},
        )


def _is_gpu(kind: ResourceType) -> bool:
    """Whether a unit of a type, as it is here, is a GPU."""
    return kind.device == "cuda" and not kind.emulated


def _ps_type(resources: Resources, here: ResourceType) -> str:
    names = [kind.name for kind in resources.types if kind.device == "cpu"]
    return names[0] if names else here.name


def _both_ways(tensor: Tensor) -> int:
    """Bytes of a value that crosses to the next stage, and of its gradient, if one comes back."""
    return tensor.nbytes * (2 if tensor.requires_grad else 1)
