"""The loss and the metrics of a job, tried on a few samples before anything is trained."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protos.job_pb2 import JobSpec
from workers.data.check import splits
from workers.data.columns.arrays import labels_in
from workers.data.columns.labels import LABEL
from workers.data.errors import DataError
from workers.data.reader import Dataset
from workers.data.tensors import first_samples, tensors_of
from workers.learning.objective import (
    Labels,
    MissingLabelError,
    Objective,
    Outputs,
    check_rows,
    named,
    total,
)
from workers.model.chain.trace import TracedModel
from workers.model.checks.numbers import Numbers, far
from workers.model.checks.probe import micro_batches_of
from workers.model.checks.trial import first_parts, joined, leaves, mark, run
from workers.model.code.entry import ModelError
from workers.model.module.randomness import Draws, refuse_draws
from workers.model.objective.loss import job_loss, learned_by
from workers.model.objective.metrics import JobMetrics

_CLASSES: Final = "cross_entropy"
_TOLERANCE: Final = 1e-4  # of a sum in other parts
_MANY: Final = 2048  # samples
_FIRST: Final = 512  # of a split that has to be read for it
_MANY_BYTES: Final = 64 << 20  # of their outputs
_ORDERS: Final = 4
_log = logging.getLogger("heterps.stage")


def check_loss(traced: TracedModel, job: JobSpec) -> None:
    """Refuse a loss that does not fit the model, or is not the mean that it declares.

    Parts of the latter would not add up to the whole batch's. It is tried on the samples that the
    model is tried on, whole and in parts; one of the job's own on the labels of many others, too.

    Raises:
        ModelError: by how much they differ, and the remedy.
        DataError: the first samples of the job do not fit it.
        Whatever the loss raises.
    """
    parts = first_parts(job)
    if not parts:
        return
    loss, batch = job_loss(job), joined(*parts)
    try:
        outputs = run(traced, batch)
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
        return
    _check_classes(job, outputs)
    labels = labels_in(batch)
    samples = len(next(iter(batch.values())))
    if loss.whole:
        _check_outputs(traced, job, outputs, parts[0], samples)
    _check_leaves(job, loss, outputs, labels)
    if samples < 4:
        return
    unknown = [name for name in loss.over if name and name not in loss.terms(outputs, labels)]
    if unknown:
        raise ModelError(
            f"model.loss: {job.model.loss}: @loss(over=…) names no term {unknown[0]!r}"
        )
    draws, numbers = Draws.now(), Numbers(loss.function)
    whole = float(total(loss.of_batch(outputs, labels)))
    fixed = loss.whole or bool(micro_batches_of(job, traced))
    drawn = draws.since()
    refuse_draws(f"model.loss: {job.model.loss}", drawn, fixed=fixed)
    draws.again()
    again = float(total(loss.of_batch(outputs, labels)))
    if whole == again and (counts := numbers.changed()):
        with suppress(Exception):  # such as an index; nothing is known then
            draws.again()
            again = far(counts, lambda: float(total(loss.of_batch(outputs, labels))))
    if whole != again and not (math.isnan(whole) and math.isnan(again)):
        raise ModelError(
            f"model.loss: {job.model.loss}: of the same samples it is {whole:g} at first and "
            f"{again:g} when called again, or often: each worker calls it for other micro-batches; "
            "expected a loss that follows from outputs and labels alone"
        )
    if loss.whole or drawn:
        return
    _check_sum(job, loss, outputs, labels)
    if job.model.loss:
        for order in _orders(found := _many(job, outputs, samples)):
            rows = torch.arange(len(order)) % samples
            given = tree_map(
                lambda output, rows=rows: output[rows] if output.ndim else output, outputs
            )
            _check_sum(job, loss, given, {name: label[order] for name, label in found.items()})


def _check_sum(job: JobSpec, loss: Objective, outputs: Outputs, labels: Labels) -> None:
    """Refuse a loss of some samples that is not what parts of these add up to."""
    whole = float(total(loss.of_batch(outputs, labels)))
    samples = len(next(iter(labels.values())))
    few = samples // 16  # at both ends, where equal labels are together
    counts, ends = loss.counts(labels), (0, few, samples // 4, samples - few, samples)
    added = 0.0
    for some in (slice(*pair) for pair in pairwise(ends) if pair[0] < pair[1]):
        own = {name: label[some] for name, label in labels.items()}
        given = _part_of(outputs, some)
        share = len(range(samples)[some]) / samples
        added += float(loss.part(given, own, share, loss.counts(own), counts))
    if not math.isfinite(whole) or math.isclose(whole, added, rel_tol=_TOLERANCE):
        return
    raise ModelError(
        f"model.loss: {job.model.loss}: of {samples} samples it is {whole:g}, and {added:g} added "
        "up of parts by what it counts; expected the mean over the samples, a value for each "
        "of them, or heterps.loss(over=…) to say what the mean is over; over='batch' where samples "
        "are held against one another"
    )


def _check_leaves(job: JobSpec, loss: Objective, outputs: Outputs, labels: Labels) -> None:
    """Refuse a loss with parameters of its own, which nobody would train or save."""
    with torch.enable_grad():
        given = tree_map(
            lambda o: o.detach().requires_grad_() if o.is_floating_point() else o, outputs
        )
        value = total(loss.of_batch(given, labels))
    found = leaves(value)
    if not value.requires_grad and any(one.requires_grad for one in named(given).values()):
        raise ModelError(
            f"model.loss: {job.model.loss}: nothing can be learned by it, as it does not depend on "
            "what the model gives, or no gradient goes back; expected a tensor that is computed of "
            "the outputs, without .item(), .detach() or torch.no_grad()"
        )
    own = [leaf for leaf in found if not any(leaf is one for one in named(given).values())]
    if own:
        raise ModelError(
            f"model.loss: {job.model.loss}: it computes with a tensor {list(own[0].shape)} that is "
            "to learn and is no output of the model, so that it is neither trained nor saved; "
            "expected it in a child of the model, and numbers [] of it among what forward returns:"
            "\n    return {'rate': …, 'scale': self.scale()}"
        )


def _many(job: JobSpec, outputs: Outputs, samples: int) -> dict[str, Tensor]:
    """Labels of many samples, from all over the split where this host keeps it.

    They are as many as outputs of that size have room for.
    """
    size = sum(output.nbytes for output in named(outputs).values()) // samples
    most = max(samples, min(_MANY, _MANY_BYTES // max(1, size)))
    dataset = Dataset.of(job, "train")
    if not (dataset.is_kept and dataset.folder is not None):
        few = max(samples, min(most, _FIRST, _MANY_BYTES // max(1, dataset.row_bytes)))
        return labels_in(tensors_of(first_samples(dataset, few).labels))
    rows = np.linspace(0, dataset.rows - 1, min(most, dataset.rows)).astype(np.int64)
    return labels_in(tensors_of(dataset.encoded().labels.take(rows)))


def _orders(labels: Labels) -> Iterator[Tensor]:
    """Orders in which equal labels are together, for each of some labels."""
    for label in [*labels.values()][:_ORDERS]:
        yield label.flatten(1)[:, 0].argsort() if label.ndim > 1 else label.argsort()


def check_metrics(traced: TracedModel, job: JobSpec) -> None:
    """Refuse metrics of the job's own that give no number, or read a label that there is none of.

    They would end the job after its training. One that fails on so few samples may do so.

    Raises:
        ModelError: a metric gave something else than a number, or numbers by name; or the name of
            another one.
        MissingLabelError: it reads a label that the job does not have.
        DataError: the first samples of the job do not fit it.
    """
    parts = first_parts(job) if job.model.metrics else ()
    if not parts:
        return
    batch, metrics = joined(*parts), JobMetrics(job)
    try:
        found = metrics.take(run(traced, batch), labels_in(batch))
        before = {name: mark(one) for name, one in found.items()}
        metrics.measure(found, "valid")
        changed = [name for name, one in found.items() if mark(one) != before[name]]
        if changed:
            raise ModelError(
                f"model.metrics: one of {', '.join(job.model.metrics)} changes in place what it is "
                f"given as {changed[0].partition('.')[2] or 'outputs'!r}, which others are given "
                "after it; expected operations that make other tensors: x.sigmoid(), not "
                "x.sigmoid_()"
            )
    except (ModelError, MissingLabelError):
        raise
    except Exception as error:
        _log.info("metrics could not be tried: %s: %s", type(error).__name__, error)


def _check_classes(job: JobSpec, outputs: Any) -> None:
    """Refuse classes that the model gives no logit for, in the splits that this host keeps.

    Raises:
        DataError: names the first of the largest, with its row among those of the split.
    """
    for loss, label, output in learned_by(job):
        if loss != _CLASSES:
            continue
        logits = output(outputs)
        for split in splits(job):
            dataset = Dataset.of(job, split)
            if not dataset.is_kept or dataset.folder is None:
                continue
            found, classes = dataset.encoded()[LABEL + label], logits.shape[-1]
            if logits.ndim == found.ndim + 1 and found.size and int(found.max()) >= classes:
                row = int(found.reshape(len(found), -1).max(axis=1).argmax())
                expected = f"less than {classes}: the model gives so many logits"
                raise DataError(dataset.where, "data.label", int(found.max()), expected, row)


def _check_outputs(
    traced: TracedModel, job: JobSpec, outputs: Any, part: Mapping[str, Tensor], samples: int
) -> None:
    """Refuse outputs that are no rows of samples, and those without that depend on these."""
    of_part = named(run(traced, part))
    check_rows(named(outputs), samples)
    check_rows(of_part, len(next(iter(part.values()))))
    for name, output in named(outputs).items():
        alike = output.ndim or torch.allclose(output, of_part[name], equal_nan=True)
        if not alike and job.train.micro_batches != 1:
            raise ModelError(
                f"{type(traced.model).__name__}: output {name!r} [] is another one of other "
                "samples, and the loss is one of whole batches; expected a row for each sample, "
                "one that does not depend on them, or train.micro_batches: 1"
            )


def _part_of(outputs: Any, some: slice) -> Any:
    return tree_map(lambda output: output[some] if output.ndim else output, outputs)
