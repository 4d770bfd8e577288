"""A loss that is one of whole batches alone, over the micro-batches of the last stage's workers.

Once a worker has run the forwards of a step, it brings its outputs and labels together with those
of all others, in the order of the batch. Each computes the same loss on leaves of its own, and goes
back through its micro-batches with its rows of the leaves' gradients: so every gradient counts
once, and samples are held against all others, on any plan. An output without samples, such as a
temperature [], is the first micro-batch's, and so is the loss that is reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.learning.objective import (
    Labels,
    Objective,
    ObjectiveError,
    Outputs,
    as_given,
    check_rows,
    named,
    total,
)
from workers.links.all_reduce import StageGroup
from workers.model.module.randomness import seed_loss
from workers.stage.steps.schedule import MicroBatchSpec, Schedule

_OUTPUT, _LABEL = "output", "label"


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a micro-batch of the step under way has come to here.

    Args:
        outputs: with their graph.
    """

    spec: MicroBatchSpec
    outputs: Mapping[str, Tensor]
    labels: Labels


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The same of any micro-batch, without graphs."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)


class WholeLoss:
    """The loss of one step after the other, at one worker.

    Args:
        seed: of the job, for what the loss draws.
        first: the step that training begins with.
    """

    def __init__(
        self, loss: Objective, group: StageGroup, schedule: Schedule, seed: int, first: int
    ) -> None:
        self._loss = loss
        self._group = group
        self._schedule = schedule
        self._seed = seed
        self._next = first
        self._kept: list[_Kept] = []
        self._parts: list[_Gathered] = []
        self._gradients: dict[str, Tensor] = {}
        self._first = 0  # micro-batch of the step: that of outputs without samples

    def keep(self, spec: MicroBatchSpec, result: Outputs, labels: Labels) -> Mapping[str, Tensor]:
        """Take in what a forward gave; its outputs by name.

        Raises:
            ObjectiveError: an output has other rows than the samples.
        """
        outputs, samples = named(result), spec.last - spec.first
        check_rows(outputs, samples)
        self._kept.append(_Kept(spec, outputs, labels))
        return outputs

    def gather(self, step: int) -> bool:
        """Wait for what the other workers have of a step, whose forwards are all done here.

        All workers call it, step by step, also those that have no part of a step. False: one has
        given up.
        """
        self._next = step + 1
        rows = [self._schedule.rows(step, index) for index in range(self._schedule.count(step))]
        filled = [index for index, (first, last) in enumerate(rows) if first < last]
        every = self._gathered()
        if not all(index in every for index in filled):
            return False
        self._first = filled[0]
        self._parts = [every[index] for index in filled]
        return True

    def compute(self, step: int, scale: float) -> dict[str, Tensor]:
        """The terms of a step that has been gathered, this worker's part of the batch's, [] each.

        Args:
            scale: of the loss, that gradients are multiplied by.

        Raises:
            ObjectiveError: an output without samples is another one in another micro-batch.
        """
        kept, self._kept, parts, self._parts = self._kept, [], self._parts, []
        self._gradients = {}
        if not kept:
            return {}
        device = next(iter(kept[0].outputs.values())).device
        leaves = {
            name: _joined(name, [part.outputs[name] for part in parts]).to(device)
            for name in kept[0].outputs
        }
        labels = {
            name: torch.cat([part.labels[name] for part in parts]).to(device)
            for name in kept[0].labels
        }
        learning = [name for name, output in kept[0].outputs.items() if output.requires_grad]
        for name in learning:
            leaves[name].requires_grad_()
        seed_loss(self._seed, step)
        terms = self._loss.of_batch(as_given(leaves), labels)
        if learning:
            found = torch.autograd.grad(
                total(terms) * scale, [leaves[name] for name in learning], allow_unused=True
            )
            pairs = zip(learning, found, strict=True)
            self._gradients = {name: grad for name, grad in pairs if grad is not None}
        mine = any(one.spec.index == self._first and one.spec.weight for one in kept)
        return {name: term.detach() for name, term in terms.items()} if mine else {}

    def gradients(self, spec: MicroBatchSpec, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the loss that was computed last, by the outputs of a micro-batch of the step.

        Of one that is computed for the other workers' sake alone they are 0.
        """
        found = {}
        for name, gradient in self._gradients.items():
            if gradient.ndim and spec.weight:
                found[name] = gradient[spec.first : spec.last]
            elif spec.weight and spec.index == self._first:
                found[name] = gradient
            else:
                found[name] = torch.zeros_like(outputs[name])
        return found

    def give_up(self, end: int) -> None:
        """Tell the others, who may wait for this worker's part of the steps before `end`."""
        for _ in range(self._next, end):
            self._group.gather_named({})
        self._next = max(self._next, end)

    def _gathered(self) -> dict[int, _Gathered]:
        """Of all workers, by the number of the micro-batch in the step."""
        own = {
            f"{one.spec.index} {kind} {name}": tensor
            for one in self._kept
            if one.spec.weight
            for kind, some in ((_OUTPUT, one.outputs), (_LABEL, one.labels))
            for name, tensor in some.items()
        }
        found: dict[int, _Gathered] = {}
        for key, tensor in self._group.gather_named(own).items():
            index, kind, name = key.split(" ", 2)
            part = found.setdefault(int(index), _Gathered())
            (part.outputs if kind == _OUTPUT else part.labels)[name] = tensor
        return found


def _joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    """An output of the whole batch: a tensor of its own."""
    if parts[0].ndim:
        return torch.cat(list(parts))
    if not all(torch.equal(part, parts[0]) or part.isnan() for part in parts):
        raise ObjectiveError(
            f"the model gives{f' {name!r}' if name else ''} [], another one for each micro-batch; "
            "expected one that does not depend on the samples, or a row for each of them"
        )
    return parts[0].clone()
