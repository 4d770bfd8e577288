"""A job's built-in losses of whole batches: what of outputs and labels each of them reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protos.job_pb2 import HeadSpec, JobSpec
from workers.data.columns.labels import ONE, WEIGHT, label_of
from workers.learning.batch_losses import contrastive, in_batch_softmax, pairwise, similarities
from workers.learning.objective import Labels, ObjectiveError, Outputs, named

_PAIRWISE, _IN_BATCH = "pairwise", "in_batch_softmax"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One of `protos.losses.OF_WHOLE_BATCHES` in a job.

    Args:
        loss: its name.
        key: of the job file, for errors.
        of: the outputs that it reads; none: all that the model gives.
        label: that says which samples are the same, or what they are ranked by; "": none.
        frequency, group: other labels; "": none.
        weighted: whether samples have weights.
    """

    loss: str
    key: str
    of: tuple[str, ...]
    label: str
    frequency: str
    group: str
    weighted: bool

    @staticmethod
    def of_head(job: JobSpec, name: str) -> "Comparison":
        """That of a job's `train.heads`."""
        head: HeadSpec = job.train.heads[name]
        of = (*head.of,) or ((name,) if head.loss == _PAIRWISE else ())
        labels = label_of(job, name), head.frequency, head.group
        key = f"train.heads.{name}"
        return Comparison(head.loss, key, of, *labels, bool(job.data.weight))

    @staticmethod
    def of_job(job: JobSpec) -> "Comparison":
        """That of `train.loss`."""
        label = job.data.labels[0] if job.data.labels else ONE if job.data.label else ""
        return Comparison(job.train.loss, "train.loss", (), label, "", "", bool(job.data.weight))

    @property
    def of_pairs(self) -> bool:
        """Whether what is held out is one row a batch, weights included."""
        return self.loss == _PAIRWISE

    def term(self, outputs: Outputs, labels: Labels) -> Tensor:
        """A value for each sample [B], or of `pairwise` the weighted mean [].

        Raises:
            ObjectiveError: the model gives other outputs.
        """
        rows, scale = self._read(outputs)
        if self.loss == _PAIRWISE:
            return self._of_pairs(rows[0], labels)[0]
        return self._of_each(self._products(rows, scale, labels), labels)

    def held_out(self, outputs: Outputs, labels: Labels) -> tuple[Tensor, Tensor]:
        """What metrics need of a batch, float32.

        Of each sample its loss, and whether its own other half is the nearest; of `pairwise` the
        mean loss and what its pairs count, each [1].
        """
        rows, scale = self._read(outputs)
        if self.loss == _PAIRWISE:
            mean, pairs = self._of_pairs(rows[0].float(), labels)
            return mean.reshape(1), pairs.reshape(1)
        logits = self._products([each.float() for each in rows], scale, labels)
        right = logits.argmax(dim=1) == torch.arange(len(logits), device=logits.device)
        return self._of_each(logits, labels).float(), right.float()

    def _of_pairs(self, scores: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
        weights = labels[WEIGHT] if self.weighted else None
        try:
            return pairwise(scores, labels[self.label], weights, labels.get(self.group))
        except ValueError as error:
            raise ObjectiveError(f"{self.key}: {error}") from None

    def _products(self, rows: Sequence[Tensor], scale: Tensor | None, labels: Labels) -> Tensor:
        one, other = rows
        try:
            return similarities(one, other, scale, labels.get(self.label))
        except ValueError as error:
            raise ObjectiveError(f"{self.key}: {error}") from None

    def _of_each(self, logits: Tensor, labels: Labels) -> Tensor:
        if self.loss == _IN_BATCH:
            return in_batch_softmax(logits, labels.get(self.frequency))
        return contrastive(logits)

    def _read(self, outputs: Outputs) -> tuple[list[Tensor], Tensor | None]:
        """The outputs with rows, as many as the loss takes, and the scale."""
        several = named(outputs)
        missing = [name for name in self.of if name not in several]
        given = [several[name] for name in self.of or several if name in several]
        rows, scales = [o for o in given if o.ndim], [o for o in given if not o.ndim]
        wanted = 1 if self.loss == _PAIRWISE else 2
        if missing or len(rows) != wanted or len(scales) > wanted - 1:
            shown = ", ".join(f"{name!r} {list(o.shape)}" for name, o in several.items())
            expected = "two of [B, D], and a scale [] at most" if wanted == 2 else "a score [B]"
            asked = f", and {self.loss} reads {', '.join(self.of)}" if self.of else ""
            raise ObjectiveError(
                f"{self.key}: {self.loss}: the model gives {shown}{asked}; expected {expected}"
            )
        return rows, scales[0] if scales else None
