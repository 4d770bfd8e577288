"""Times the layers of a model on batches, each layer alone: forward, backward and update.

The same program runs on every worker of a data-parallel group; a group of one needs no other
process. Workers begin each part of a layer together, as they would in a step.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.job_pb2 import DenseOptimizer
from workers.learning.optimizers import make_optimizer
from workers.learning.precision import Precision
from workers.links.all_reduce import StageGroup
from workers.model.trace import TracedModel
from workers.profiling.rows import ShardRows


class Part(IntEnum):
    """What of a layer was timed."""

    COMPUTE = 0  # forward, backward and the optimizer's step, wall time
    PULL = 1  # rows from the shard, wall time
    PUSH = 2  # gradients to the shard, wall time
    HANDLING = 3  # this process's processor time of pulling and pushing


class LayerTimer:
    """Runs a model layer by layer.

    Args:
        traced: the model, on `device` and in training mode.
        precision: of forward passes, as in the job.
    """

    def __init__(
        self,
        traced: TracedModel,
        optimizer: DenseOptimizer,
        rows: ShardRows,
        device: torch.device,
        precision: Precision,
    ) -> None:
        self.graphs = [traced.stage(i, i) for i in range(len(traced.layers))]
        self.parameters = [
            [p for p in graph.module.parameters() if p.requires_grad] for graph in self.graphs
        ]
        self.optimizers = [make_optimizer(optimizer, own) for own in self.parameters]
        self._rows = rows
        self.device = device
        self._precision = precision

    def time(
        self, batches: Iterable[Mapping[str, Tensor]], group: StageGroup | None = None
    ) -> NDArray[np.float64]:
        """Seconds by batch, layer and `Part`: float64 [batches, layers, parts].

        Args:
            batches: this worker's share of each, with the label.
            group: the workers that do the same at the same time.
        """
        timings = []
        for batch in batches:
            values = dict(batch)
            timings.append([self._layer(i, values, group) for i in range(len(self.graphs))])
        return np.array(timings, dtype=np.float64)

    def run_layer(self, index: int, values: dict[str, Tensor]) -> list[Tensor]:
        """Forward and backward of one layer, whose rows are bound; its outputs join `values`."""
        graph = self.graphs[index]
        inputs = []
        for name in graph.inputs:
            tensor = values[name].detach().to(self.device)
            inputs.append(tensor.requires_grad_() if tensor.is_floating_point() else tensor)
        with self._precision.computing():
            results = graph.module(*inputs)
        made = [r for r in results if r.requires_grad and not any(r is i for i in inputs)]
        auxiliary = [getattr(m, "aux_loss", None) for m in graph.module.modules()]
        losses = [a for a in auxiliary if isinstance(a, Tensor) and a.requires_grad]
        if made:
            # Any gradient costs the same; a small one keeps the weights where they are.
            gradients = [torch.full_like(r, 1e-6) for r in made]
            torch.autograd.backward(
                [*made, *losses], [*gradients, *(torch.zeros_like(a) for a in losses)]
            )
        optimizer = self.optimizers[index]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        values.update(zip(graph.outputs, (r.detach() for r in results), strict=True))
        return list(results)

    def time_reduce(self, group: StageGroup, repeats: int) -> NDArray[np.float64]:
        """Seconds of summing all dense gradients over the group, as a step does: [repeats]."""
        everything = [p for own in self.parameters for p in own]
        timings = np.zeros(repeats)
        if everything:
            for number in range(repeats):
                group.barrier()
                begin = self._now()
                group.sum_gradients(everything)
                timings[number] = self._now() - begin
        return timings

    def _layer(
        self, index: int, values: dict[str, Tensor], group: StageGroup | None
    ) -> Sequence[float]:
        graph = self.graphs[index]
        parts = [0.0] * len(Part)
        if graph.lookups:
            parts[Part.PULL] = self._handle(parts, group, lambda: self._rows.bind(graph, values))
        self._meet(group)
        begin = self._now()
        self.run_layer(index, values)
        parts[Part.COMPUTE] = self._now() - begin
        if graph.lookups:
            parts[Part.PUSH] = self._handle(parts, group, lambda: self._rows.push(graph))
        return parts

    def _handle(
        self, parts: list[float], group: StageGroup | None, work: Callable[[], None]
    ) -> float:
        self._meet(group)
        begin, used = self._now(), time.process_time()
        work()
        parts[Part.HANDLING] += time.process_time() - used
        return self._now() - begin

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @staticmethod
    def _meet(group: StageGroup | None) -> None:
        if group is not None:
            group.barrier()


def share_of(batch: Mapping[str, Tensor], rank: int, workers: int) -> dict[str, Tensor]:
    """One worker's contiguous share of a batch; all of them together are the batch."""
    rows = len(batch["label"])
    first, last = rank * rows // workers, (rank + 1) * rows // workers
    return {name: tensor[first:last] for name, tensor in batch.items()}
