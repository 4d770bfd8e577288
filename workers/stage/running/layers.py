"""A worker's layers, and how they are run."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.device.copies import Staging
from workers.learning.objective import Outputs, as_given, named
from workers.learning.precision import Precision, wide
from workers.links.all_reduce import StageGroup
from workers.model.chain.graph import StageGraph
from workers.model.module.randomness import Randomness
from workers.model.module.statistics import RunningStatistics


@dataclass(frozen=True, slots=True)
class StageLayers:
    """One worker's layers, and what it takes to run them.

    Args:
        graph: the layers, on the device.
        group: the workers of the stage.
        device: that they compute on.
        staging: to and from the device.
        precision: of forward passes.
        randomness: that they draw from in training.
        statistics: that they change in training.
    """

    graph: StageGraph
    group: StageGroup
    device: torch.device
    staging: Staging
    precision: Precision
    randomness: Randomness
    statistics: RunningStatistics

    def train(self, tensors: Mapping[str, Tensor], step: int, index: int) -> dict[str, Tensor]:
        """The same as `run`, for micro-batch `index` of a step."""
        with self.randomness.drawing(step, index), self.statistics.counting(step, index):
            return self.run(tensors)

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs of inputs on the device, whose embeddings' rows are bound."""
        with self.precision.computing():
            results = self.graph.module(*(tensors[name] for name in self.graph.inputs))
        return self.graph.by_name(results)

    def leaving(
        self, outputs: Mapping[str, Tensor], as_came: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What goes to the next stage: outputs, and what passes through from the host.

        That is what losses read besides, which no layer has: its names alone have dots.
        """
        passing = {
            name: as_came[name]
            for name, tensor in outputs.items()
            if name in as_came and not tensor.requires_grad
        }
        return {**outputs, **passing, **for_losses(as_came)}

    def result(self, outputs: Mapping[str, Tensor]) -> Outputs:
        """What the model gives, in the last stage; of 16 bits in float32, for the loss."""
        return as_given(wide(named(self.graph.result(outputs))))


def for_losses(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a micro-batch's tensors those that losses need."""
    return {name: tensor for name, tensor in tensors.items() if "." in name}
