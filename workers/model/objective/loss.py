"""The loss of a job: of its own code, or built-in ones for its labels."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from protos.job_pb2 import HeadSpec, JobSpec
from protos.losses import OF_WHOLE_BATCHES, of_whole_batches
from workers.data.columns.labels import NEXT_TOKEN, ONE, WEIGHT, in_lists, label_of
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
    Over,
)
from workers.model.code.entry import ModelError, load_entry
from workers.model.objective.comparison import Comparison


def job_loss(job: JobSpec) -> Objective:
    """What a job learns by.

    Raises:
        ModelError: its own loss is not there, or cannot be used.
    """
    if not job.model.loss:
        over: dict[str, Over] = {EVERY: WEIGHTS if job.data.weight else SAMPLES}
        if not job.train.heads:
            label = sole_label(job)
            if _has_several(job, job.train.loss, label):
                over[EVERY] = _Counted(job, label).sum
            return Objective(_of_one(job, label), over, of_whole_batches(job))
        for name, head in job.train.heads.items():
            if _has_several(job, head.loss, label := label_of(job, name)):
                over[name] = _Counted(job, label).sum
        return Objective(_of_heads(job), over, of_whole_batches(job))
    own = load_entry(job.model.loss, Path(job.directory), "model.loss")
    try:
        found = Objective.declared(own)
    except ObjectiveError as error:
        raise ModelError(f"model.loss: {job.model.loss}: {error}") from None
    if WEIGHTS in found.over.values() and not job.data.weight:
        raise ModelError(f"model.loss: {job.model.loss}: @loss(over='weights') without data.weight")
    return found


def learned_by(job: JobSpec) -> Iterator[tuple[str, str, Callable[[Outputs], Tensor]]]:
    """The built-in losses of a job, each with its label and what it reads of a model's outputs."""
    if job.model.loss:
        return
    for name, head in sorted(job.train.heads.items()):
        yield head.loss, label_of(job, name), partial(head_of, name=name)
    if not job.train.heads:
        yield job.train.loss, sole_label(job), partial(sole, name=job.train.loss)


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


def sole_label(job: JobSpec) -> str:
    """The label of a job without heads, as losses find it."""
    return job.data.labels[0] if job.data.labels else ONE


def _has_several(job: JobSpec, loss: str, label: str) -> bool:
    """Whether a sample has several values of a label, or none: means are over all that count."""
    return loss == NEXT_TOKEN or in_lists(job, label) is not None


@dataclass(frozen=True, slots=True)
class _Counted:
    """The values of a label that count, each by the weight of its sample."""

    job: JobSpec
    label: str

    def each(self, labels: Labels) -> Tensor:
        """Of each sample, [B]."""
        numbers = counted(labels[self.label])
        return numbers * labels[WEIGHT] if self.job.data.weight else numbers

    def sum(self, labels: Labels) -> Tensor:
        """Of all, []."""
        return self.each(labels).sum()


def _weight(head: HeadSpec) -> float:
    return head.weight if head.HasField("weight") else 1.0


def _of_one(job: JobSpec, label: str) -> Function:
    name = job.train.loss
    if name in OF_WHOLE_BATCHES:
        return Comparison.of_job(job).term
    return _term(job, name, label, lambda outputs: sole(outputs, name))


def _term(
    job: JobSpec, loss: str, label: str, output: Callable[[Outputs], Tensor]
) -> Callable[[Outputs, Labels], Tensor]:
    """The loss of each sample [B]: its mean, or, where it has several labels, their sum."""
    values = _Counted(job, label) if _has_several(job, loss, label) else None

    def term(outputs: Outputs, labels: Labels) -> Tensor:
        means = sample_losses(loss, output(outputs), labels[label])
        return means if values is None else means * values.each(labels)

    return term


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
    return _term(job, kind, label, lambda outputs: head_of(outputs, name))
