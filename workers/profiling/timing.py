"""Times the layers of a model on batches, each layer alone: forward, backward and update.

The last one's times are with the loss, as in a stage that has it.

The same program runs on every worker of a data-parallel group; a group of one needs no other
process. Workers begin each part of a layer together, as they would in a step. One alone is timed by
a clock that leaves out what other processes of a busy machine cost it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from protos.job_pb2 import DenseOptimizer
from workers.data.columns.arrays import labels_in
from workers.learning.objective import Objective, as_given, named
from workers.learning.optimizers import make_optimizer
from workers.learning.precision import Precision, wide
from workers.links.all_reduce import StageGroup
from workers.model.chain.graph import StageGraph
from workers.model.chain.trace import TracedModel
from workers.moe.layer import MoE
from workers.profiling.clock import QuietClock
from workers.profiling.rows import ShardRows
from workers.stage.experts.outside import outside_of


class Part(IntEnum):
    """What of a layer's computing was timed: wall time."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2  # the optimizer's step


class RowPart(IntEnum):
    """What of moving a layer's rows was timed."""

    PULL = 0  # from the shard, wall time
    PUSH = 1  # gradients to the shard, wall time
    HANDLING = 2  # this process's processor time of both


def parameters_of(graphs: Iterable[StageGraph]) -> list[list[nn.Parameter]]:
    """What is trained of each layer; what layers share is of the first of them."""
    counted: set[Tensor] = set()
    found = []
    for graph in graphs:
        own = [p for p in graph.module.parameters() if p.requires_grad and p not in counted]
        counted.update(own)
        found.append(own)
    return found


class LayerTimer:
    """Runs a model layer by layer.

    Args:
        traced: the model, on `device` and in training mode; experts of it may be out of memory.
        precision: of forward passes, as in the job.
        loss: of the job.
        runs: layers that training state is kept of at the same time, in order; all where there
            are none. With several the model is on the host, and comes to `device` by runs.
    """

    def __init__(
        self,
        traced: TracedModel,
        optimizer: DenseOptimizer,
        rows: ShardRows,
        device: torch.device,
        precision: Precision,
        loss: Objective,
        runs: Sequence[range] = (),
    ) -> None:
        self.graphs = [traced.layer(i) for i in range(len(traced.layers))]
        self.parameters = parameters_of(self.graphs)
        self.optimizers = [make_optimizer(optimizer, own) for own in self.parameters]
        self._runs = runs
        self.outside = outside_of(traced.model)
        self._rows = rows
        self.device = device
        self._precision = precision
        self._loss = loss
        self._learns = torch.zeros((), device=device, requires_grad=True)
        self._clock = QuietClock()
        self._quiet = True

    def time(
        self, batches: Iterable[Mapping[str, Tensor]], group: StageGroup | None = None
    ) -> NDArray[np.float64]:
        """Seconds by batch, layer and `Part`: float64 [batches, layers, parts].

        Args:
            batches: micro-batches of this worker, with the label.
            group: the workers that do the same at the same time.
        """
        if self._runs:
            return self._time_runs([dict(batch) for batch in batches], group)
        timings = []
        for batch in batches:
            values = dict(batch)
            timings.append([self._layer(i, values, group) for i in range(len(self.graphs))])
        return np.array(timings, dtype=np.float64)

    @contextmanager
    def held(self, layers: range) -> Iterator[None]:
        """Have layers where they compute; with runs, nothing of their training is kept after it."""
        if not self._runs:
            yield
            return
        modules = [self.graphs[index].module for index in layers]
        for module in modules:
            module.to(self.device)
        try:
            yield
        finally:
            for index, module in zip(layers, modules, strict=True):
                self._forget(index)
                module.to("cpu")

    def forget(self) -> None:
        """Give back the memory of training: gradients, and what optimizers keep."""
        for index in range(len(self.graphs)):
            self._forget(index)

    def time_rows(
        self, batches: Iterable[Mapping[str, Tensor]], group: StageGroup | None = None
    ) -> NDArray[np.float64]:
        """Seconds by batch, layer and `RowPart` of moving rows: float64 [batches, layers, parts].

        Args:
            batches: this worker's share of steps.
            group: the workers that do the same at the same time.
        """
        taken = []
        for batch in batches:
            timings = np.zeros((len(self.graphs), len(RowPart)))
            for index, graph in enumerate(self.graphs):
                if graph.lookups:
                    parts = timings[index]
                    bind = partial(self._rows.bind, graph, batch)
                    parts[RowPart.PULL] = self._handle(parts, group, bind)
                    self._rows.learn(graph)
                    push = partial(self._rows.push, graph)
                    parts[RowPart.PUSH] = self._handle(parts, group, push)
            taken.append(timings)
        return np.array(taken, dtype=np.float64)

    def run_layer(
        self, index: int, values: dict[str, Any], parts: list[float] | None = None
    ) -> list[Tensor]:
        """Forward, backward and update of a layer, whose rows are bound.

        Args:
            values: what it takes, in the main tensors; its outputs join them.
            parts: takes in the seconds of each `Part`.
        """
        graph, inputs = self.graphs[index], []
        for name in graph.inputs:
            inputs.append(tree_map_only(Tensor, self._given, values[name]))
        begun = self._now()
        with self._precision.computing():
            results = graph.module(*inputs)
        ends = results
        if index == len(self.graphs) - 1:
            ends = [self._loss_of(graph, results, values)]
        seconds = [self._now() - begun]
        # What is changed in place is made.
        passed = {id(i) for i in tensors_in(inputs) if not i._version}
        made = [r for r in tensors_in(ends) if r.requires_grad and id(r) not in passed]
        auxiliary = [getattr(m, "aux_loss", None) for m in graph.module.modules()]
        losses = [a for a in auxiliary if isinstance(a, Tensor) and a.requires_grad]
        # Any gradient costs the same; a small one keeps the weights where they are. In a stage the
        # layers behind have made it.
        gradients = [torch.full_like(r, 1e-6) for r in made]
        gradients += [torch.zeros_like(a) for a in losses]
        begun = self._now()
        if made:
            torch.autograd.backward([*made, *losses], gradients)
        seconds.append(self._now() - begun)
        begun = self._now()
        optimizer = self.optimizers[index]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if self.outside is not None:
            self.outside.step_alone()
        seconds.append(self._now() - begun)
        if parts is not None:
            parts[:] = seconds
        told = tree_map_only(Tensor, _as_sent, list(results))
        values.update(zip(graph.outputs, told, strict=True))
        return tensors_in(results)

    def room_of(self, index: int) -> int:
        """Bytes of memory for experts of a layer that lie out of it."""
        return sum(self.outside.rooms[name] for name in self._mixtures(index) if self.outside)

    def disk_of(self, index: int) -> int:
        """Bytes on disk of experts of a layer that lie out of memory."""
        return sum(self.outside.disk_of(name) for name in self._mixtures(index) if self.outside)

    @property
    def disk_moved(self) -> int:
        """Bytes read and written so far, of experts that lie out of memory."""
        outside = self.outside
        return outside.stats.bytes_read + outside.bytes_written if outside is not None else 0

    def _mixtures(self, index: int) -> list[str]:
        """Names of a layer's mixtures of experts."""
        modules = self.graphs[index].module.named_modules()
        return [name for name, module in modules if isinstance(module, MoE)]

    def time_reduce(self, group: StageGroup, repeats: int) -> NDArray[np.float64]:
        """Seconds of summing all dense gradients over the group, as a step does: [repeats].

        With runs the largest is summed, and the others are taken to be as fast a byte.
        """
        everything = [p for own in self.parameters for p in own]
        timings = np.zeros(repeats)
        if not everything:
            return timings
        runs = self._runs or [range(len(self.graphs))]
        most = max(runs, key=self._bytes)
        summed = [p for index in most for p in self.parameters[index]]
        with self.held(most):
            for parameter in summed if self._runs else ():
                parameter.grad = torch.zeros_like(parameter)
            for number in range(repeats):
                group.barrier()
                begin = self._now()
                group.sum_gradients(summed)
                timings[number] = self._now() - begin
        return timings * (sum(p.nbytes for p in everything) / self._bytes(most))

    def _bytes(self, layers: range) -> int:
        return sum(p.nbytes for index in layers for p in self.parameters[index])

    def _given(self, value: Tensor) -> Tensor:
        """What a layer gets, which it may change in place."""
        tensor = value.detach().to(self.device)
        if not value.requires_grad:
            return tensor.clone()
        return _Before.apply(tensor, self._learns)  # type: ignore[no-any-return,no-untyped-call]

    def _loss_of(
        self, graph: StageGraph, results: Sequence[Tensor], values: Mapping[str, Any]
    ) -> Tensor:
        """What the job's loss is of what the last layer gives."""
        labels = labels_in(values)
        counts = self._loss.counts(labels)
        on_device = {name: label.to(self.device) for name, label in labels.items()}
        outputs = as_given(wide(named(graph.result(graph.by_name(results)))))
        return self._loss.part(outputs, on_device, 1.0, counts, counts)

    def _time_runs(
        self, each: Sequence[dict[str, Any]], group: StageGroup | None
    ) -> NDArray[np.float64]:
        """As `time`, of batches' columns, all through one run of layers before the next."""
        columns = [values.keys() | set() for values in each]
        of_runs = []
        for run in self._runs:
            with self.held(run):
                first = dict(each[0])
                for index in run:  # allocates what it needs
                    self._layer(index, first, group)
                of_runs.append([[self._layer(i, values, group) for i in run] for values in each])
            later = {name for graph in self.graphs[run.stop :] for name in graph.inputs}
            for values, own in zip(each, columns, strict=True):
                for name in values.keys() - later - own:
                    del values[name]
        return np.concatenate([np.array(some, dtype=np.float64) for some in of_runs], axis=1)

    def _forget(self, index: int) -> None:
        for parameter in self.parameters[index]:
            parameter.grad = None
        if (optimizer := self.optimizers[index]) is not None:
            optimizer.state.clear()

    def _layer(
        self, index: int, values: dict[str, Any], group: StageGroup | None
    ) -> Sequence[float]:
        graph, parts = self.graphs[index], [0.0] * len(Part)
        self._rows.bind(graph, values)
        self._meet(group)
        self.run_layer(index, values, parts)
        self._rows.drop(graph)
        return parts

    def _handle(
        self, parts: NDArray[np.float64], group: StageGroup | None, work: Callable[[], None]
    ) -> float:
        self._meet(group)
        begin, used = self._now(), time.process_time()
        work()
        parts[RowPart.HANDLING] += time.process_time() - used
        return self._now() - begin

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock.now() if self._quiet else time.perf_counter()

    def _meet(self, group: StageGroup | None) -> None:
        # Workers at once may keep one another off the processors: that counts.
        self._quiet = group is None
        if group is not None:
            group.barrier()


def _as_sent(value: Tensor) -> Tensor:
    """What a layer gives to others, which are asked for its gradient where it has a use for it."""
    return value.detach().requires_grad_(value.requires_grad)


class _Before(torch.autograd.Function):
    """What the layers before give: a gradient is computed for them, and theirs to deal with."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, learns: Tensor) -> Tensor:
        """A copy of the value."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        """None of it goes further."""
        return None, None


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors that are anywhere in some values, such as the state of an LSTM."""
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def share_of(batch: Mapping[str, Tensor], rank: int, workers: int) -> dict[str, Tensor]:
    """One worker's contiguous share of a batch; all of them together are the batch."""
    rows = len(next(iter(batch.values())))
    first, last = rank * rows // workers, (rank + 1) * rows // workers
    return {name: tensor[first:last] for name, tensor in batch.items()}


def first_of(batch: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    """The first samples of a batch."""
    return {name: tensor[:samples] for name, tensor in batch.items()}
