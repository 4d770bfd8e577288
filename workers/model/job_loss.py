"""The loss of a job: of its own code, or built-in ones for its labels."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from protos.job_pb2 import HeadSpec, JobSpec
from protos.losses import OF_WHOLE_BATCHES, of_whole_batches
from workers.data.labels import NEXT_TOKEN, ONE, WEIGHT, label_of
from workers.learning.losses import counted, sample_losses
from workers.learning.objective import (
    EVERY,
    SAMPLES,
    WEIGHTS,
    Function,
    Labels,
    Objective,
    ObjectiveError,
    Outputs,
    loss,
)
from workers.model.comparison import Comparison
from workers.model.entry import ModelError, load_entry


def job_loss(job: JobSpec) -> Objective:
    """What a job learns by.

    Raises:
        ModelError: its own loss is not there, or cannot be used.
    """
    if not job.model.loss:
        if job.train.loss == NEXT_TOKEN and not job.train.heads:
            return Objective.declared(_of_tokens(job))
        function = _of_heads(job) if job.train.heads else _of_one(job)
        over = {EVERY: WEIGHTS if job.data.weight else SAMPLES}
        return Objective(function, over, of_whole_batches(job))
    own = load_entry(job.model.loss, Path(job.directory), "model.loss")
    try:
        found = Objective.declared(own)
    except ObjectiveError as error:
        raise ModelError(f"model.loss: {job.model.loss}: {error}") from None
    if WEIGHTS in found.over.values() and not job.data.weight:
        raise ModelError(f"model.loss: {job.model.loss}: @loss(over='weights') without data.weight")
    return found


def sole(outputs: Outputs, name: str) -> Tensor:
    """The only output of a model.

    Raises:
        ObjectiveError: there are several.
    """
    if isinstance(outputs, Tensor):
        return outputs
    if len(outputs) != 1:
        raise ObjectiveError(
            f"train.loss: {name}: the model gives {', '.join(outputs)}; expected one tensor, or "
            "train.heads with a loss for each"
        )
    return next(iter(outputs.values()))


def head_of(outputs: Outputs, name: str) -> Tensor:
    """The output of that name.

    Raises:
        ObjectiveError: the model gives none.
    """
    if isinstance(outputs, Tensor) or name not in outputs:
        given = "one tensor" if isinstance(outputs, Tensor) else ", ".join(outputs)
        raise ObjectiveError(
            f"train.heads.{name}: the model gives {given}; expected forward to return a dict with "
            f"a tensor {name!r}"
        )
    return outputs[name]


def _weight(head: HeadSpec) -> float:
    return head.weight if head.HasField("weight") else 1.0


def _of_one(job: JobSpec) -> Function:
    name = job.train.loss
    if name in OF_WHOLE_BATCHES:
        return Comparison.of_job(job).term
    label = job.data.labels[0] if job.data.labels else ONE

    def one(outputs: Outputs, labels: Labels) -> Tensor:
        return sample_losses(name, sole(outputs, name), labels[label])

    return one


def _of_tokens(job: JobSpec) -> Function:
    """The mean over the tokens that count, each by the weight of its sample."""
    weighted = bool(job.data.weight)

    def tokens(labels: Labels) -> Tensor:
        numbers = counted(labels[ONE])
        return numbers * labels[WEIGHT] if weighted else numbers

    @loss(over=lambda labels: tokens(labels).sum())
    def following(outputs: Outputs, labels: Labels) -> Tensor:
        means = sample_losses(NEXT_TOKEN, sole(outputs, NEXT_TOKEN), labels[ONE])
        return means * tokens(labels)

    return following


def _of_heads(job: JobSpec) -> Function:
    heads = {
        name: (_of_head(job, name), _weight(head)) for name, head in sorted(job.train.heads.items())
    }

    def several(outputs: Outputs, labels: Labels) -> Mapping[str, Tensor]:
        return {name: weight * term(outputs, labels) for name, (term, weight) in heads.items()}

    return several


def _of_head(job: JobSpec, name: str) -> Callable[[Outputs, Labels], Tensor]:
    kind, label = job.train.heads[name].loss, label_of(job, name)
    if kind in OF_WHOLE_BATCHES:
        return Comparison.of_head(job, name).term
    return lambda outputs, labels: sample_losses(kind, head_of(outputs, name), labels[label])
