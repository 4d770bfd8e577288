"""Experts out of memory whose gradients are gathered over a step, which is then judged.

An expert's extent has its weights, what an optimizer keeps of them, and its gradient. Backwards of
a step's micro-batches add to the gradient; once all are summed and the step is to be applied that
is noted, and an expert makes it when it next comes: a step costs no pass over the experts. Of a
step that is skipped nothing is noted, so that its gradients count for nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from workers.device.mapped import mapped
from workers.learning.norms import norms, squared_of
from workers.offload.experts.layout import LayerAt
from workers.offload.experts.source import Source
from workers.offload.experts.updates import Rule
from workers.offload.training.arriving import ArrivingExperts
from workers.offload.training.write_back import ChangingCache

WEIGHTS = ("w1", "w2")
_GRADIENTS = tuple(f"{key}.grad" for key in WEIGHTS)
_MOST_STEPS = 1024  # that are noted, for experts that get no tokens
Options = Mapping[str, Any]


def with_gradients(source: Source, rule: Rule, kept: Mapping[str, Mapping[str, Tensor]]) -> Source:
    """A layer's experts with what an optimizer keeps of them, and room for their gradients.

    Args:
        kept: of w1 and w2 by their names in the layer, of all experts; zeros where it has none.
    """
    weights = source.layer.tensors
    states = [replace(one, name=f"{one.name}.{state}") for one in weights for state in rule.states]
    gradients = [replace(one, name=f"{one.name}.grad") for one in weights]

    def expert(number: int) -> Sequence[Tensor]:
        made = [torch.zeros(one.shape, dtype=one.dtype) for one in (*states, *gradients)]
        for one, at in zip(states, made, strict=False):
            key, _, state = one.name.partition(".")
            if key in kept:
                at.copy_(kept[key][state][number])
        return [*source.expert(number), *made]

    return Source(replace(source.layer, tensors=(*weights, *states, *gradients)), expert)


@dataclass(frozen=True, slots=True)
class _Applied:
    """A step that was applied.

    step: its number.
    backwards: of micro-batches, on all workers.
    scale: by which gradients are multiplied.
    options: of the optimizer for each of WEIGHTS.
    """

    step: int
    backwards: int
    scale: float
    options: tuple[Options, ...]


@dataclass(slots=True)
class Course:
    """How far a layer is.

    at: its place in the file.
    rule: by which its experts are updated.
    options: of the optimizer for each of WEIGHTS, after so many applied steps.
    before: updates that were made of it before any of `applied`.
    applied: steps since, in which it had a gradient.
    done: of each expert, updates that were made.
    gathered: of each, the step that the gradient in its extent is of; -1: none.
    parts: of each, micro-batches in it.
    norms: of each, of its gradient's parts, float64 [2, E].
    backwards: of the step under way.
    used: whether any worker had one in the step that is judged.
    task: the backward that came last, by which a second one of the same is known.
    """

    at: LayerAt
    rule: Rule
    options: Callable[[int], tuple[Options, ...]]
    before: int
    applied: list[_Applied] = field(default_factory=list)
    done: list[int] = field(init=False)
    gathered: list[int] = field(init=False)
    parts: list[int] = field(init=False)
    norms: Tensor = field(init=False)
    backwards: int = 0
    used: bool = False
    task: int = -1

    def __post_init__(self) -> None:
        experts = self.at.experts
        self.done, self.gathered = [self.before] * experts, [-1] * experts
        self.parts = [0] * experts
        self.norms = torch.zeros(len(WEIGHTS), experts, dtype=torch.float64)

    @property
    def steps(self) -> int:
        """Updates that every expert has to have made."""
        return self.before + len(self.applied)


class GatheredExperts(ArrivingExperts):
    """The experts of a stage's layers; until this is closed.

    Args:
        rooms: bytes of memory for each layer's experts, of which `store` has the sum.
        step: that is the first.
        applied: steps before it that were.

    Attributes:
        slots: experts that have room in memory.
        lock: to be held while experts arrive.
    """

    def __init__(
        self,
        store: ChangingCache,
        courses: list[Course],
        folder: Path,
        rooms: Mapping[str, int],
        step: int,
        applied: int,
    ) -> None:
        super().__init__(store, "train.offload: it")
        self._courses, self._folder = courses, folder
        self.rooms = rooms
        self._first = self._step = step
        self._applied = applied
        self.slots, self.lock = store.slots, RLock()

    @property
    def weight_bytes(self) -> int:
        """Of all experts' weights."""
        return sum(
            one.size * course.at.experts
            for course in self._courses
            for one in course.at.tensors
            if one.name in WEIGHTS
        )

    def disk_of(self, name: str) -> int:
        """Bytes that a layer's experts take in the file."""
        (at,) = (course.at for course in self._courses if course.at.name == name)
        return at.experts * at.extent

    @property
    def names(self) -> list[str]:
        """Of the parameters that are here."""
        return [f"{course.at.name}.{key}" for course in self._courses for key in WEIGHTS]

    def require_stepped(self, layer: int) -> None:
        """Any forward may come: weights change with the step alone."""

    def begin_backward(self, layer: int) -> None:
        """Of one micro-batch.

        Raises:
            RuntimeError: it comes twice to this layer, whose sums would be of another order.
        """
        course, task = self._courses[layer], torch._C._current_graph_task_id()
        if task >= 0 and task == course.task:
            raise RuntimeError(
                f"train.offload: {course.at.name}: expected one call of it in a forward, got two "
                "or more: leave train.offload out, or give each call a layer of its own"
            )
        course.task = task
        course.backwards += 1

    def update(
        self, layer: int, expert: int, tensors: dict[str, Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Add a micro-batch's gradients of w1 and w2 of an expert that has arrived."""
        course = self._courses[layer]
        self._store.changed.add(self._store.key(layer, expert))
        into = _gradients(tensors)
        if course.gathered[expert] != self._step:
            course.gathered[expert], course.parts[expert] = self._step, 0
            for one, gradient in zip(into, gradients, strict=True):
                one.copy_(gradient)
        else:
            for one, gradient in zip(into, gradients, strict=True):
                one.add_(gradient.to(one.dtype))
        course.parts[expert] += 1
        course.norms[:, expert] = norms(into)

    def counts(self) -> list[Tensor]:
        """Of each layer, int64 [1 + E]: this worker's backwards, and parts of each expert."""
        return [
            torch.tensor([course.backwards, *self._parts(course)], dtype=torch.int64)
            for course in self._courses
        ]

    def gather(
        self, counts: Sequence[Tensor], add_up: Callable[[Sequence[Tensor]], None] | None
    ) -> None:
        """Have the step's gradients be those of all workers, whose `counts` these are, summed.

        Args:
            add_up: sums tensors over the workers, in place; None: there is one.
        """
        with self.lock:
            for layer, (course, all_of_it) in enumerate(zip(self._courses, counts, strict=True)):
                backwards, *parts = all_of_it.tolist()
                course.used = backwards > 0
                course.norms[:, torch.tensor(parts) == 0] = 0
                if add_up is not None:
                    self._add_up(layer, course, backwards, parts, add_up)

    def squared_norms(self) -> list[float]:
        """Of the step's gradient: of w1 and w2 of each layer that has any, in order."""
        used = [course for course in self._courses if course.used]
        return [squared_of(one) for course in used for one in course.norms]

    def apply(self, scale: float) -> None:
        """Take the step, with gradients multiplied by `scale`."""
        for layer, course in enumerate(self._courses):
            if course.used:
                options = course.options(self._applied)
                if course.applied and course.applied[-1].options == options:
                    options = course.applied[-1].options
                noted = _Applied(self._step, course.backwards, scale, options)
                course.applied.append(noted)
            if len(course.applied) >= _MOST_STEPS:
                with self.lock:
                    for _ in self._bring(layer, range(course.at.experts)):
                        pass
                course.before, course.applied = course.steps, []
        self._applied += 1
        self.skip()

    def skip(self) -> None:
        """Leave the step; another begins."""
        self._step += 1
        for course in self._courses:
            course.backwards, course.used = 0, False

    def step_alone(self) -> None:
        """Take a step at a worker that is alone, and have its experts make it at once."""
        self.gather(self.counts(), None)
        gathered = [
            [e for e, count in enumerate(self._parts(course)) if count] for course in self._courses
        ]
        self.apply(1.0)
        with self.lock:
            for layer, experts in enumerate(gathered):
                for _ in self._bring(layer, experts):
                    pass

    def weights(self) -> dict[str, Tensor]:
        """All experts' weights by the names that stacks of them have in the model, in files."""
        return self._stacks(WEIGHTS)[0]

    def state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """The same, and what the optimizer keeps of each; nothing where no update was made."""
        kinds = sorted({state for course in self._courses for state in course.rule.states})
        keys = [*WEIGHTS, *(f"{key}.{kind}" for key in WEIGHTS for kind in kinds)]
        weights, kept = self._stacks(keys)
        for course in self._courses:
            if course.rule.counts and course.steps:
                for key in WEIGHTS:
                    steps = torch.tensor(float(course.steps))
                    kept.setdefault(f"{course.at.name}.{key}", {})["step"] = steps
        return weights, kept

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """Have other weights, by the names of `weights`; what the optimizer keeps stays."""
        with self.lock:
            for layer, course in enumerate(self._courses):
                for e, tensors in self._bring(layer, range(course.at.experts)):
                    for key in WEIGHTS:
                        tensors[key].copy_(weights[f"{course.at.name}.{key}"][e])
                    self._store.changed.add(self._store.key(layer, e))

    def line(self) -> str:
        """What the disk has cost so far, in a line."""
        return self._told(self._step - self._first)

    def close(self) -> None:
        """Give up memory and file."""
        self._store.close()

    def _parts(self, course: Course) -> list[int]:
        return [
            count if step == self._step else 0
            for step, count in zip(course.gathered, course.parts, strict=True)
        ]

    def _add_up(
        self,
        layer: int,
        course: Course,
        backwards: int,
        parts: Sequence[int],
        add_up: Callable[[Sequence[Tensor]], None],
    ) -> None:
        """Sum those that any worker has, in one order on all of them."""
        course.backwards = backwards
        summed = [e for e, count in enumerate(parts) if count]
        for i, e in enumerate(summed):
            ahead = [(layer, one) for one in summed[i + 1 : i + self.slots]]
            for _, tensors in self._bring(layer, [e], ahead):
                gradients = _gradients(tensors)
                self._store.changed.add(self._store.key(layer, e))
                if course.gathered[e] != self._step:
                    for one in gradients:
                        one.zero_()
                add_up(gradients)
                course.gathered[e], course.parts[e] = self._step, parts[e]
                course.norms[:, e] = norms(gradients)

    def _stacks(
        self, keys: Sequence[str]
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Weights, and of these what is kept, of all experts one after the other."""
        weights, kept = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for layer, course in enumerate(self._courses):
            stacks = {}
            for one in course.at.tensors:
                if one.name in keys and (one.name in WEIGHTS or course.steps):
                    shape = course.at.experts, *one.shape
                    stacks[one.name] = mapped(self._folder, shape, one.dtype)
            with self.lock:
                for e, tensors in self._bring(layer, range(course.at.experts)):
                    for name, stack in stacks.items():
                        stack[e] = tensors[name]
            for name, stack in stacks.items():
                key, _, state = name.partition(".")
                if state:
                    kept.setdefault(f"{course.at.name}.{key}", {})[state] = stack
                else:
                    weights[f"{course.at.name}.{key}"] = stack
        return weights, kept

    def _catch_up(self, layer: int, expert: int, tensors: dict[str, Tensor]) -> None:
        """Make the steps that were applied since it was here last."""
        course = self._courses[layer]
        for number in range(course.done[expert] - course.before, len(course.applied)):
            applied = course.applied[number]
            gradients: list[Tensor] | None = None
            if course.gathered[expert] == applied.step:
                gradients = _gradients(tensors)
            try:
                self._make(layer, expert, tensors, applied, gradients)
            except BaseException as error:  # part of a step
                self.broken = error
                raise
            course.done[expert] += 1

    def _make(
        self,
        layer: int,
        expert: int,
        tensors: dict[str, Tensor],
        applied: _Applied,
        gradients: list[Tensor] | None,
    ) -> None:
        """Make one step of an expert, whose gradient is zeros where it has none."""
        course = self._courses[layer]
        made = course.done[expert]
        if gradients is not None:
            short = course.parts[expert] < applied.backwards
            for one in gradients:
                if short:  # zeros of others, by which -0.0 becomes 0.0
                    one.add_(0.0)
                if applied.scale != 1.0:
                    one.mul_(applied.scale)
        for number, key in enumerate(WEIGHTS):
            options = applied.options[number]
            if gradients is None and not course.rule.moves_alone(options):
                continue
            weight = tensors[key]
            gradient = torch.zeros_like(weight) if gradients is None else gradients[number]
            state = {name: tensors[f"{key}.{name}"] for name in course.rule.states}
            self._store.changed.add(self._store.key(layer, expert))
            course.rule.update([weight], [gradient], [state], made, options)


def _gradients(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensors[name] for name in _GRADIENTS]
