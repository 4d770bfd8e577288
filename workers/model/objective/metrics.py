"""What is measured of held-out samples: by built-in metrics, and by functions of the job's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.job_pb2 import JobSpec
from protos.losses import OF_WHOLE_BATCHES
from workers.data.columns.labels import WEIGHT, in_lists, label_of
from workers.learning.losses import BINARY, held_out, predicted
from workers.learning.objective import (
    ByName,
    Labels,
    Objective,
    Outputs,
    as_given,
    named,
    samples_of,
)
from workers.learning.quality import measure
from workers.model.code.entry import ModelError, load_entry
from workers.model.objective.comparison import Comparison
from workers.model.objective.loss import head_of, job_loss, sole, sole_label

_OUTPUT, _LABEL = "output.", "label."  # of what functions of the job's own take
_ALONE = "alone."  # an output without samples
_SCORE, _TRUTH = "score.", "truth."  # of a head
_SUM, _COUNT = "sum.", "count."  # of a term of the job's own loss
_ROWS, _WEIGHT = "rows", "weight"  # of a batch how many samples; what each counts
_ONLY = ""  # the only head, and the only term
Metric = Callable[[Outputs, Labels], Any]


@dataclass(frozen=True, slots=True)
class _Head:
    """An output that a built-in loss holds against a label."""

    loss: str
    label: str
    by_column: bool  # whether each place of the label's lists is an outcome of its own

    @staticmethod
    def of(job: JobSpec, loss: str, label: str) -> "_Head":
        lists = in_lists(job, label)
        return _Head(loss, label, lists is not None and not lists.ragged)


class JobMetrics:
    """What a job measures of held-out samples.

    It takes batch by batch what will be needed of each, as tensors by name whose rows are samples,
    or one row a batch; from all of them, in the order of the files, come the metrics. So these do
    not depend on who predicted which batch.
    """

    def __init__(self, job: JobSpec) -> None:
        self._heads: dict[str, _Head | Comparison] = {}
        self._loss: Objective | None = None
        if job.model.loss:
            self._loss = job_loss(job)
        elif job.train.heads:
            for name, head in sorted(job.train.heads.items()):
                whole = head.loss in OF_WHOLE_BATCHES
                self._heads[name] = (
                    Comparison.of_head(job, name)
                    if whole
                    else _Head.of(job, head.loss, label_of(job, name))
                )
        elif job.train.loss in OF_WHOLE_BATCHES:
            self._heads[_ONLY] = Comparison.of_job(job)
        else:
            self._heads[_ONLY] = _Head.of(job, job.train.loss, sole_label(job))
        self._weighted = bool(job.data.weight and self._heads)
        own = {entry.rpartition(":")[2]: _function(job, entry) for entry in job.model.metrics}
        self._objects = {name: made for name, one in own.items() if (made := _object(one))}
        self._functions = {name: one for name, one in own.items() if name not in self._objects}
        self._meant = job.train.loss if not job.model.loss and not job.train.heads else None

    def scores(self, outputs: Outputs, labels: Labels) -> dict[str, Tensor]:
        """What a model is recognised by, float32 [B, …] of each of its outputs."""
        if self._heads and not any(isinstance(h, Comparison) for h in self._heads.values()):
            return {_SCORE + name: found[0] for name, found in self._held_out(outputs, labels)}
        return {_OUTPUT + name: output.float() for name, output in named(outputs).items()}

    def take(self, outputs: Outputs, labels: Labels) -> dict[str, Tensor]:
        """What metrics need of a batch, by name."""
        found: dict[str, Tensor] = {}
        for name, (scores, truth) in self._held_out(outputs, labels):
            found |= {_SCORE + name: scores, _TRUTH + name: truth}
        if self._weighted:
            found[_WEIGHT] = labels[WEIGHT].float()
        if self._objects:
            found[_ROWS] = torch.tensor([samples_of(outputs, labels)])
        if self._functions or self._objects:
            for name, output in named(outputs).items():
                alone = not output.ndim
                found[(_ALONE if alone else _OUTPUT) + name] = (
                    output.reshape(1) if alone else output
                )
            found |= {_LABEL + name: label for name, label in labels.items()}
        if self._loss is not None:
            samples = samples_of(outputs, labels)
            counts = dict(zip(self._loss.counted, self._loss.counts(labels), strict=True))
            for name, mean in self._loss.terms(outputs, labels).items():
                count = counts.get(name if name in self._loss.over else _ONLY, samples)
                value = mean.double() * count if count else torch.zeros((), dtype=torch.float64)
                found[_SUM + name] = value.reshape(1)
                found[_COUNT + name] = torch.tensor([count], dtype=torch.float64)
        return found

    def measure(self, found: Mapping[str, Tensor], prefix: str) -> dict[str, float]:
        """The metrics, named PREFIX_METRIC, PREFIX_HEAD_METRIC or PREFIX_loss_TERM.

        Args:
            found: what was taken of all batches, one after the other.

        Raises:
            ModelError: a function of the job's own gave no number, or one with another's name.
        """
        results: dict[str, float] = {}
        for name, head in self._heads.items():
            scores, truth = (_of(found, kind + name) for kind in (_SCORE, _TRUTH))
            whole = isinstance(head, Comparison) and head.of_pairs
            weights = _of(found, _WEIGHT) if self._weighted and not whole else None
            named_so = f"{prefix}_{name}" if name else prefix
            by_column = isinstance(head, _Head) and head.by_column
            results |= measure(head.loss, scores, truth, named_so, weights, by_column=by_column)
        terms = [name.removeprefix(_SUM) for name in found if name.startswith(_SUM)]
        for name in terms:
            mean = float(found[_SUM + name].sum() / found[_COUNT + name].sum())
            results[f"{prefix}_loss_{name}" if name else f"{prefix}_loss"] = mean
        if terms and _ONLY not in terms:
            results[f"{prefix}_loss"] = sum(results[f"{prefix}_loss_{name}"] for name in terms)
        if (self._functions or self._objects) and found:
            alone = {name: values[0] for name, values in _starting(found, _ALONE).items()}
            outputs, labels = _starting(found, _OUTPUT), ByName(_starting(found, _LABEL))
            for name, function in self._functions.items():
                value = function(as_given({**outputs, **alone}), ByName(labels))
                _add(results, _numbers(name, value, prefix), prefix)
            for name, metric in self._objects.items():
                value = self._accumulated(metric, found[_ROWS], outputs, alone, labels)
                _add(results, _numbers(name, value, prefix), prefix)
        return results

    def _accumulated(
        self,
        metric: Any,
        batches: Tensor,
        outputs: Mapping[str, Tensor],
        alone: Mapping[str, Tensor],
        labels: Labels,
    ) -> Any:
        """What a metric with `update` and `compute` comes to, batch by batch in their order.

        Args:
            batches: [n], rows of each.
            outputs, labels: of all rows; `alone` are of none.
        """
        metric.reset()
        last = 0
        for rows in batches.tolist():
            part = slice(last, last + rows)
            last += rows
            own = ByName({name: label[part] for name, label in labels.items()})
            given = as_given({**{name: out[part] for name, out in outputs.items()}, **alone})
            targets = own.keys() - {WEIGHT}
            if isinstance(given, Tensor) and len(targets) == 1:
                scores = given if self._meant is None else predicted(self._meant, given)
                target = own[targets.pop()]
                binary = self._meant is not None and (self._meant or BINARY) == BINARY
                # What does not count is -1, as of classes: what `ignore_index` may name.
                metric.update(scores, target.nan_to_num(-1).long() if binary else target)
            else:
                metric.update(given, own)
        return metric.compute()

    def _held_out(
        self, outputs: Outputs, labels: Labels
    ) -> list[tuple[str, tuple[Tensor, Tensor]]]:
        found = []
        for name, head in self._heads.items():
            if isinstance(head, Comparison):
                found.append((name, head.held_out(outputs, labels)))
                continue
            output = head_of(outputs, name) if name else sole(outputs, head.loss)
            found.append((name, held_out(head.loss, output, labels[head.label])))
        return found


def _function(job: JobSpec, entry: str) -> Metric:
    return load_entry(entry, Path(job.directory), "model.metrics")


def _object(found: Any) -> Any:
    """A metric that is updated by batches, as torchmetrics' are; None where it is a function."""
    if not all(hasattr(found, name) for name in ("update", "compute", "reset")):
        return None
    return found() if isinstance(found, type) else found


def _of(found: Mapping[str, Tensor], name: str) -> NDArray[np.float32]:
    values: NDArray[np.float32] = found[name].numpy() if name in found else np.empty(0, np.float32)
    return values


def _starting(found: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}


def _numbers(name: str, found: Any, prefix: str) -> dict[str, float]:
    several = found if isinstance(found, Mapping) else {_ONLY: found}
    results = {}
    for key, value in several.items():
        shown = f"{name}_{key}" if key else name
        try:
            results[f"{prefix}_{shown}"] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise ModelError(
                f"model.metrics: {shown!r} is {value!r}; expected a number, or numbers by name"
            ) from None
    return results


def _add(results: dict[str, float], own: Mapping[str, float], prefix: str) -> None:
    for name, value in own.items():
        if name in results:
            own_name = name.removeprefix(f"{prefix}_")
            raise ModelError(
                f"model.metrics: {own_name!r} is another metric's name, too; expected functions, "
                "and names of what they give, that are no other's, such as those of the loss"
            )
        results[name] = value
