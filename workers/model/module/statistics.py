"""Running statistics of normalising layers: as if micro-batches came in order in one process.

A layer's update is linear: running = (1 - a) * running + a * statistic. So each worker keeps what
its own micro-batches add, weighted by how many come after them; the sum over the workers of the
stage is what the step adds, and all of them hold the same after it. With momentum None running is
the mean of all statistics, which is a sum as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from workers.model.code.entry import ModelError
from workers.model.module.buffers import ChangingBuffers, counts, other_buffers

# Bytes of a buffer that is kept for each step, as changes of its `data` are not to be seen.
_SMALL = 1 << 16


@dataclass(slots=True)
class _Added:
    """What the calls of a layer in one micro-batch add: decayed by later calls in it."""

    calls: int = 0
    mean: Tensor | None = None
    variance: Tensor | None = None


class _Layer:
    """Keeps a layer's buffers as they were over a forward, and hands its statistics to `record`."""

    def __init__(self, module: _NormBase) -> None:
        self.module = module
        self.into: _Added | None = None  # None: they are not counted
        self._kept: tuple[Tensor, Tensor, Tensor, float | None] | None = None
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    @property
    def cumulative(self) -> bool:
        """Whether running is the mean of all statistics."""
        return self.module.momentum is None

    @property
    def rate(self) -> float:
        """Share of a new statistic."""
        return float(self.module.momentum or 0.0)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not module.training:
            return
        norm: Any = self.module
        if isinstance(norm, _BatchNorm) and arguments and arguments[0].numel() == norm.num_features:
            raise ModelError(
                "batch normalisation has one sample, which has no variance; expected micro-batches "
                "of at least two: train.drop_last: true where an epoch's last batch is so small, "
                "or fewer train.micro_batches"
            )
        mean, variance, tracked = norm.running_mean, norm.running_var, norm.num_batches_tracked
        self._kept = mean, variance, tracked, norm.momentum
        norm.running_mean, norm.running_var = torch.zeros_like(mean), torch.zeros_like(variance)
        norm.num_batches_tracked = torch.zeros_like(tracked)
        norm.momentum = norm.momentum and 1.0  # they are then the statistics themselves

    def _after(self, module: nn.Module, arguments: object, result: object) -> None:
        if self._kept is None:
            return
        norm: Any = self.module
        mean, variance = norm.running_mean, norm.running_var
        norm.running_mean, norm.running_var, norm.num_batches_tracked, norm.momentum = self._kept
        self._kept = None
        into = self.into
        if into is None:
            return
        share, decay = (1.0, 1.0) if self.cumulative else (self.rate, 1.0 - self.rate)
        into.calls += 1
        into.mean = mean * share if into.mean is None else into.mean * decay + mean * share
        into.variance = (
            variance * share if into.variance is None else into.variance * decay + variance * share
        )


class RunningStatistics:
    """The running statistics of a stage, and its other buffers.

    Args:
        module: the stage's.
        workers: of the stage.
    """

    def __init__(self, module: nn.Module, workers: int) -> None:
        self._workers = workers
        self._layers = [
            _Layer(m) for m in module.modules() if isinstance(m, _NormBase) and counts(m)
        ]
        self._others = other_buffers(module)
        self._changing = ChangingBuffers(module)
        self._marks = self._marked()
        self._copies = {
            path: buffer.clone()
            for path, (buffer, _) in self._marks.items()
            if workers > 1 and buffer is not None
        }
        self._steps: dict[int, dict[int, list[_Added]]] = {}
        # What the forwards of steps that are not over have found of buffers that change, by step.
        self._found: dict[int, dict[str, Tensor]] = {}
        self._begun = False

    @contextmanager
    def counting(self, step: int, index: int) -> Iterator[None]:
        """Count what a forward adds, as that of micro-batch `index` of a step.

        A forward outside of it, such as one that is run again to save memory, adds nothing. A
        worker's forwards of a step come before those of the next one.
        """
        self._find(step)
        if not self._layers:
            with self._changing.renewed():
                yield
            return
        added = [_Added() for _ in self._layers]
        self._steps.setdefault(step, {})[index] = added
        for layer, into in zip(self._layers, added, strict=True):
            layer.into = into
        try:
            with self._changing.renewed():
                yield
        finally:
            for layer in self._layers:
                layer.into = None

    def _find(self, step: int) -> None:
        """Keep what a step's forwards find of the other buffers, but of large ones that stay."""
        if step in self._found:
            return
        marks = self._marks if self._begun else {}
        self._found[step] = {
            path: found[0].clone()
            for path, found in self._marked().items()
            if found[0] is not None
            and (found[0].nbytes <= _SMALL or not _same(found, marks.get(path)))
        }
        self._begun = True

    @contextmanager
    def as_of(self, step: int) -> Iterator[None]:
        """Meanwhile buffers are as after so many steps, whatever later ones have done to them."""
        kept = {path: self._place(path, value) for path, value in self._earlier(step)}
        try:
            yield
        finally:
            for path, value in kept.items():
                self._place(path, value)

    def go_back(self, step: int) -> None:
        """Have buffers be as after so many steps, for good: later ones do not count."""
        for path, value in self._earlier(step):
            child, name = self._others[path]
            now: Tensor | None = child._buffers[name]
            if now is not None and now.shape == value.shape:
                now.detach().copy_(value)  # others may have the same tensor
            else:
                self._place(path, value)

    def _earlier(self, step: int) -> list[tuple[str, Tensor]]:
        return list(self._found.get(step, {}).items())

    def _place(self, path: str, value: Tensor | None) -> Tensor | None:
        """Put a buffer into its place; the one that was there."""
        child, name = self._others[path]
        before: Tensor | None = child._buffers[name]
        child._buffers[name] = value
        return before

    def take(self, step: int, count: int) -> list[Tensor]:
        """What this worker's micro-batches of a step add, to be summed over the stage's workers.

        Args:
            count: micro-batches of the step, over all workers.

        Raises:
            ModelError: a forward has changed another buffer, which several workers cannot combine.
        """
        if self._workers > 1:
            self._check_others()
        parts = self._steps.pop(step, {})
        tensors: list[Tensor] = []
        for number, layer in enumerate(self._layers):
            mean = torch.zeros_like(layer.module.running_mean)  # type: ignore[arg-type]
            variance = torch.zeros_like(layer.module.running_var)  # type: ignore[arg-type]
            for index, added in sorted((i, layers[number]) for i, layers in parts.items()):
                if added.mean is not None and added.variance is not None:
                    later = added.calls * (count - 1 - index)
                    weight = 1.0 if layer.cumulative else (1.0 - layer.rate) ** later
                    mean += weight * added.mean
                    variance += weight * added.variance
            tensors += [mean, variance]
        if self._layers:
            calls = [sum(layers[n].calls for layers in parts.values()) for n in self._numbers()]
            tensors.append(torch.tensor(calls, dtype=torch.int64, device=tensors[0].device))
        return tensors

    @torch.no_grad()
    def apply(self, step: int, sums: list[Tensor]) -> None:
        """Take a step, of which `sums` is what all workers add."""
        self._found = {number: some for number, some in self._found.items() if number > step}
        if not self._layers:
            return
        *pairs, calls = sums
        for number, called in enumerate(calls.tolist()):
            if not called:  # in evaluation: backwards under way have read what it keeps
                continue
            layer: Any = self._layers[number]
            norm = layer.module
            for running, added in zip(
                (norm.running_mean, norm.running_var), pairs[2 * number :], strict=False
            ):
                if layer.cumulative:
                    before = int(norm.num_batches_tracked)
                    running.mul_(before).add_(added).div_(max(1, before + called))
                else:
                    running.mul_((1.0 - layer.rate) ** called).add_(added)
            if isinstance(norm, _BatchNorm):
                norm.num_batches_tracked += called

    def _numbers(self) -> range:
        return range(len(self._layers))

    def _marked(self) -> dict[str, tuple[Tensor | None, int]]:
        """The buffers, kept so that no new one can be taken for them, and their versions."""
        marks = {}
        for path, (child, name) in self._others.items():
            buffer: Tensor | None = getattr(child, name)
            marks[path] = (buffer, buffer._version if buffer is not None else 0)
        return marks

    def _check_others(self) -> None:
        if not self._others:
            return
        changed = [
            path
            for path, (buffer, version) in self._marked().items()
            if buffer is not self._marks[path][0] or version != self._marks[path][1]
        ]
        # Changes of `buffer.data` count no version: values are compared, in the first step.
        copies, self._copies = self._copies, {}
        changed += [
            path
            for path, copy in copies.items()
            if (buffer := self._marks[path][0]) is not None
            and not torch.allclose(buffer, copy, rtol=0, atol=0, equal_nan=True)
        ]
        if changed:
            raise ModelError(
                f"{changed[0]!r}: training changes this buffer in forward, and each of the stage's "
                f"{self._workers} workers has another one; expected a module that keeps nothing "
                "over its forwards, such as nn.BatchNorm1d, whose statistics are combined; or a "
                "stage of one worker: `limit: 1` of its type in schedule.resources"
            )


def _same(found: tuple[Tensor | None, int], before: tuple[Tensor | None, int] | None) -> bool:
    """Whether a buffer is the one that it was, and has not been changed."""
    return before is not None and found[0] is before[0] and found[1] == before[1]
