"""Experts that are trained out of memory: how far each is, and what it still has to be told."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from workers.offload.experts.layout import LayerAt, TensorAt
from workers.offload.experts.pack import write
from workers.offload.experts.source import Source
from workers.offload.experts.trained import STEPS
from workers.offload.experts.updates import Rule, options_of
from workers.offload.training.arriving import ArrivingExperts
from workers.offload.training.write_back import ChangingCache

_MOST_STEPS = 1024  # whose options are kept, for experts that get no tokens


@dataclass(slots=True)
class Course:
    """How far a layer is.

    rule: of its experts.
    optimizer, group: theirs, by the group's number: the optimizer has others once it was loaded.
    options: of the optimizer in each step since the file was opened.
    before: steps that were made before that.
    updated: experts were updated of which the optimizer's step is still to come.
    """

    rule: Rule
    optimizer: Optimizer
    group: int
    before: int
    options: list[dict[str, Any]]
    updated: bool = False

    @property
    def options_now(self) -> dict[str, Any]:
        """Of the optimizer, as its next step would have them."""
        return options_of(self.optimizer.param_groups[self.group])

    @property
    def steps(self) -> int:
        """That all is done of."""
        return self.before + len(self.options) - self.updated


class Training(ArrivingExperts):
    """A model's experts out of memory while it is trained; until this is closed.

    Attributes:
        path: of the file of experts.
        slots: experts that have room in memory.
    """

    def __init__(self, store: ChangingCache, courses: list[Course], period: int) -> None:
        super().__init__(store, f"{store.packed.path}: its training")
        self._courses, self._period = courses, period
        self.path, self.slots = store.packed.path, store.slots
        self._steps = 0
        self._closed = False

    @property
    def steps(self) -> int:
        """Of the optimizer, in which any expert was updated; of earlier sessions too."""
        return max(course.steps for course in self._courses)

    def begin_backward(self, layer: int) -> None:
        """Of a layer, whose experts may now be updated.

        Raises:
            RuntimeError: it had one already, since the optimizer's last step.
        """
        course = self._courses[layer]
        if course.updated:
            raise RuntimeError(
                f"{self._store.packed.layers[layer].name}: expected one backward in each of the "
                "optimizer's steps: experts are updated in it"
            )
        course.updated = True
        options = course.options_now
        alike = course.options and course.options[-1] == options
        course.options.append(course.options[-1] if alike else options)

    def update(
        self, layer: int, expert: int, tensors: dict[str, Tensor], gradients: list[Tensor]
    ) -> None:
        """Make the optimizer's step of an expert that has arrived, in its layer's backward."""
        self._step(layer, expert, tensors, gradients, self._courses[layer].options[-1])

    def require_stepped(self, layer: int) -> None:
        """See that its experts are all of one step.

        Raises:
            RuntimeError: some are updated, and the optimizer's step is still to come.
        """
        if self._courses[layer].updated:
            raise RuntimeError(
                f"{self._store.packed.layers[layer].name}: expected optimizer.step() between a "
                "backward and the next forward: experts are updated in it"
            )

    def stepped(self) -> None:
        """The optimizer has made its step of all else.

        Raises:
            RuntimeError: its options are others than in the backward, which had updated experts.
        """
        for i, course in enumerate(self._courses):
            if course.updated and course.options[-1] != course.options_now:
                self.broken = RuntimeError(
                    f"{self._store.packed.layers[i].name}: expected the optimizer's options to "
                    "stay as they are from a backward to optimizer.step(): experts were updated"
                )
                raise self.broken
            course.updated = False
            if len(course.options) >= _MOST_STEPS:
                self._catch_all_up(i)
                course.before += len(course.options)
                course.options.clear()
        self._steps += 1
        if self._period and self._steps % self._period == 0:
            self.flush()

    def line(self) -> str:
        """What the disk has cost so far, in a line."""
        return self._told(self._steps)

    def flush(self) -> None:
        """Write all that have changed to the file. It is whole when this is closed, not before.

        Raises:
            OSError: the disk fails.
        """
        self._store.write_back()

    def save(self, path: str | Path, states: bool = False) -> None:
        """Write the experts as they are now to another file, whole or not at all.

        Args:
            path: the file, as `pack_experts` writes them.
            states: with all that is needed to go on from it, as `path` has them. Without, it is for
                `offload` and other readers.

        Raises:
            OSError: it cannot be written.
        """
        write([self._source(i, states) for i in range(len(self._courses))], Path(path))

    def close(self) -> None:
        """Bring all experts to the last step, and the file to be whole.

        After an error that broke the training off it is left as it is, which the next that opens it
        is told.
        """
        if self._closed:
            self._store.close()  # which may have been interrupted
            return
        self._closed = True
        try:
            if self.broken is None and not any(course.updated for course in self._courses):
                for i in range(len(self._courses)):
                    self._catch_all_up(i)
                self.flush()
                self._store.packed.finish()
        finally:
            self._store.close()

    def _catch_all_up(self, layer: int) -> None:
        """Have all experts of a layer be of the same step."""
        for _ in self._bring(layer, range(self._store.packed.layers[layer].experts)):
            pass

    def _catch_up(self, layer: int, expert: int, tensors: dict[str, Tensor]) -> None:
        """Make the steps in which it got no tokens."""
        course = self._courses[layer]
        done, steps = int(tensors[STEPS]), course.steps
        if done >= steps:
            return
        weights = [tensors[one.name] for one in weights_of(self._store.packed.layers[layer])]
        for step in range(done, steps):
            options = course.options[step - course.before]
            if course.rule.moves_alone(options):
                zeros = [torch.zeros_like(one) for one in weights]
                self._step(layer, expert, tensors, zeros, options)
            else:
                tensors[STEPS] += 1
                self._store.changed.add(self._store.key(layer, expert))

    def _step(
        self,
        layer: int,
        expert: int,
        tensors: dict[str, Tensor],
        gradients: list[Tensor],
        options: dict[str, Any],
    ) -> None:
        rule = self._courses[layer].rule
        names = [one.name for one in weights_of(self._store.packed.layers[layer])]
        states = [{one: tensors[f"{name}.{one}"] for one in rule.states} for name in names]
        weights = [tensors[name] for name in names]
        try:
            self._store.changed.add(self._store.key(layer, expert))
            rule.update(weights, gradients, states, int(tensors[STEPS]), options)
            tensors[STEPS] += 1
        except BaseException as error:  # part of a step
            self.broken = error
            raise

    def _source(self, index: int, states: bool) -> Source:
        layer = self._store.packed.layers[index]
        kept = layer.tensors if states else weights_of(layer)

        def expert(number: int) -> Sequence[Tensor]:
            ahead = range(number + 1, min(number + self.slots, layer.experts))
            for _, tensors in self._bring(index, [number], [(index, e) for e in ahead]):
                return [tensors[one.name].clone() for one in kept]
            raise AssertionError

        return Source(replace(layer, tensors=tuple(kept)), expert)


def weights_of(layer: LayerAt) -> list[TensorAt]:
    """Of the tensors of a file with states those that are no states."""
    return [one for one in layer.tensors if one.name != STEPS and "." not in one.name]
