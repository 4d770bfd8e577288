"""The loss and the metrics of a job, tried on a few samples before anything is trained."""

import logging
import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protos.job_pb2 import JobSpec
from workers.data.columns import labels_in
from workers.learning.objective import MissingLabelError, check_rows, named, total
from workers.model.entry import ModelError
from workers.model.job_loss import job_loss
from workers.model.job_metrics import JobMetrics
from workers.model.probe import first_parts, joined, run
from workers.model.trace import TracedModel

_TOLERANCE: Final = 1e-4  # of a sum in other parts
_log = logging.getLogger("heterps.stage")


def check_loss(traced: TracedModel, job: JobSpec) -> None:
    """Refuse a loss that does not fit the model, or is not the mean that it declares.

    Parts of the latter would not add up to the whole batch's. It is tried on the samples that the
    model is tried on, whole and in two parts.

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
    labels = labels_in(batch)
    samples = len(next(iter(batch.values())))
    if loss.whole:
        _check_outputs(traced, job, outputs, parts[0], samples)
    if samples < 4:
        return
    unknown = [name for name in loss.over if name and name not in loss.terms(outputs, labels)]
    if unknown:
        raise ModelError(
            f"model.loss: {job.model.loss}: @loss(over=…) names no term {unknown[0]!r}"
        )
    whole = float(total(loss.of_batch(outputs, labels)))
    if loss.whole:
        return
    counts = loss.counts(labels)
    cut = samples // 4
    added = 0.0
    for some in (slice(0, cut), slice(cut, samples)):
        own = {name: label[some] for name, label in labels.items()}
        given = _part_of(outputs, some)
        share = len(range(samples)[some]) / samples
        added += float(loss.part(given, own, share, loss.counts(own), counts))
    if not math.isfinite(whole) or math.isclose(whole, added, rel_tol=_TOLERANCE):
        return
    if whole != float(total(loss.of_batch(outputs, labels))):
        return  # it draws random numbers
    raise ModelError(
        f"model.loss: {job.model.loss}: of {samples} samples it is {whole:g}, and {added:g} added "
        "up of two parts by what it counts; expected the mean over the samples, a value for each "
        "of them, or heterps.loss(over=…) to say what the mean is over; over='batch' where samples "
        "are held against one another"
    )


def check_metrics(traced: TracedModel, job: JobSpec) -> None:
    """Refuse metrics of the job's own that give no number, or read a label that there is none of.

    They would end the job after its training. One that fails on so few samples may do so.

    Raises:
        ModelError: a metric gave something else than a number, or numbers by name.
        MissingLabelError: it reads a label that the job does not have.
        DataError: the first samples of the job do not fit it.
    """
    parts = first_parts(job) if job.model.metrics else ()
    if not parts:
        return
    batch, metrics = joined(*parts), JobMetrics(job)
    try:
        found = metrics.take(run(traced, batch), labels_in(batch))
        metrics.measure(found, "valid")
    except (ModelError, MissingLabelError):
        raise
    except Exception as error:
        _log.info("metrics could not be tried: %s: %s", type(error).__name__, error)


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
