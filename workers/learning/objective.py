"""What a job learns by: a sum of terms, each a mean over what it counts.

A micro-batch's part of a term is its own mean times its share of what the whole batch counts, so
that the parts add up to the whole batch's mean, however the batch is cut. A share is of samples
unless the loss says that it counts something else, such as tokens: an average of averages would be
another loss then. Hugging Face's trainer does the same by `num_items_in_batch`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor

Outputs = Tensor | Mapping[str, Tensor]
Labels = Mapping[str, Tensor]
Function = Callable[[Outputs, Labels], Tensor | Mapping[str, Tensor]]
Count = Callable[[Labels], Tensor | float]
Over = Literal["samples", "weights", "batch"] | Count
F = TypeVar("F", bound=Callable[..., object])

SAMPLES: Final[Literal["samples"]] = "samples"
WEIGHTS: Final[Literal["weights"]] = "weights"
BATCH: Final[Literal["batch"]] = "batch"
_DECLARED: Final = "heterps_over"
EVERY: Final = ""  # the terms that are not named
_ONLY: Final = ""  # the output of a model that gives one tensor


class ObjectiveError(ValueError):
    """A loss that cannot be used as it is."""


class MissingLabelError(ObjectiveError, KeyError):
    """A loss or metric reads a label that the job does not have."""

    __str__ = ObjectiveError.__str__  # that of a KeyError quotes


class ByName(dict[str, Tensor]):
    """Labels as code of the job's own takes them; says which there are of one that is not."""

    def __missing__(self, name: str) -> Tensor:
        """Refuse it."""
        raise MissingLabelError(
            f"label {name!r}: got {', '.join(self) or 'none'}; expected it among data.labels, or "
            "`weight` with data.weight"
        )


def loss(*, over: Over | Mapping[str, Over] = "samples") -> Callable[[F], F]:
    """Declares what the means of a job's own loss are over.

    Args:
        over: "samples"; "weights" of `data.weight`; a function of a batch's labels that counts,
            such as `lambda batch: (batch["next"] >= 0).sum()`; or "batch" where samples are held
            against one another: the function gets the outputs of whole batches then. Of several
            terms one for each, by its name.
    """

    def declare(function: F) -> F:
        setattr(function, _DECLARED, over)
        return function

    return declare


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a job.

    Args:
        function: of what the model gives for some samples, and of their labels and weights by name;
            returns a term, or several by name: a mean [] over what the term counts, or a value for
            each sample [B].
        over: what terms count, by their names; `EVERY` for the others.
        whole: whether the function is one of whole batches alone.
    """

    function: Function
    over: Mapping[str, Over]
    whole: bool = False

    @staticmethod
    def declared(function: Function) -> "Objective":
        """By what `loss` has declared of a function.

        Raises:
            ObjectiveError: it is nothing that can be counted.
        """
        over: Over | Mapping[str, Over] = getattr(function, _DECLARED, SAMPLES)
        by_term: dict[str, Over] = dict(over) if isinstance(over, Mapping) else {EVERY: over}
        for one in by_term.values():
            if one not in (SAMPLES, WEIGHTS, BATCH) and not callable(one):
                raise ObjectiveError(
                    f"@loss(over={one!r}); expected samples, weights, batch, or a function of the "
                    "labels that counts"
                )
        whole = BATCH in by_term.values()
        return Objective(function, {EVERY: SAMPLES, **by_term}, whole)

    @property
    def counted(self) -> tuple[str, ...]:
        """The names in `over` of terms that count something else than samples.

        They are sorted: what the first stage counts of a batch the last one reads in this order,
        and neither maps of a job nor sets of its code have the same one in all processes.
        """
        return tuple(sorted(n for n, over in self.over.items() if over not in (SAMPLES, BATCH)))

    def counts(self, labels: Labels) -> list[float]:
        """What some samples count for each of `counted`.

        Raises:
            ObjectiveError: less than nothing.
        """
        found = []
        for name in self.counted:
            over = self.over[name]
            if over == WEIGHTS:
                number = float(labels["weight"].double().sum())
            else:
                assert callable(over)
                number = float(over(ByName(labels)))
            if not 0 <= number < math.inf:
                raise ObjectiveError(
                    f"@loss(over=…){f' of {name!r}' if name else ''} counts {number:g}; expected a "
                    "finite number of at least 0"
                )
            found.append(number)
        return found

    def terms(self, outputs: Outputs, labels: Labels) -> dict[str, Tensor]:
        """The terms of some samples, each [] and a mean; the only one is called ``.

        Raises:
            ObjectiveError: the function returned something else.
        """
        returned = self.function(outputs, ByName(labels))
        several = returned if isinstance(returned, Mapping) else {EVERY: returned}
        for name in several:
            if not isinstance(name, str):
                raise ObjectiveError(f"the loss has a term {name!r}; expected terms by text")
        samples = samples_of(outputs, labels)
        return {name: self._mean(name, value, labels, samples) for name, value in several.items()}

    def part(
        self,
        outputs: Outputs,
        labels: Labels,
        share: float,
        own: Sequence[float],
        whole: Sequence[float],
    ) -> Tensor:
        """What a micro-batch adds to the loss of its batch, []; arguments are those of `parts`."""
        return total(self.parts(outputs, labels, share, own, whole))

    def parts(
        self,
        outputs: Outputs,
        labels: Labels,
        share: float,
        own: Sequence[float],
        whole: Sequence[float],
    ) -> dict[str, Tensor]:
        """What a micro-batch adds to each term of the loss of its batch, [] by its name.

        Args:
            share: of the batch's samples, that the micro-batch has.
            own: `counts` of the micro-batch.
            whole: of the batch. Of one that counts nothing the term is 0.
        """
        shares = {
            name: mine / every if every else 0.0
            for name, mine, every in zip(self.counted, own, whole, strict=True)
        }
        found: dict[str, Tensor] = {}
        for name, mean in self.terms(outputs, labels).items():
            weight = shares.get(name if name in self.over else EVERY, share)
            # A mean over nothing is no number, and neither is its gradient.
            found[name] = mean * weight if weight else _nothing(outputs)
        if not found:
            raise ObjectiveError("the loss returned no term; expected one or more")
        return found

    def of_batch(self, outputs: Outputs, labels: Labels) -> dict[str, Tensor]:
        """The terms of a whole batch's loss, [] by name."""
        counts = self.counts(labels)
        return self.parts(outputs, labels, 1.0, counts, counts)

    def _mean(self, name: str, value: Tensor, labels: Labels, samples: int) -> Tensor:
        if not (isinstance(value, Tensor) and tuple(value.shape) in ((), (samples,))):
            got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ObjectiveError(
                f"the loss{f' {name!r}' if name else ''} is {got}; expected a mean [], or a value "
                f"for each of {samples} samples"
            )
        if not value.ndim:
            return value
        over = self.over.get(name, self.over[EVERY])
        if over in (SAMPLES, BATCH):
            return value.mean()
        if over == WEIGHTS:
            weights = labels["weight"].to(value)
            return (weights * value).sum() / weights.sum()
        assert callable(over)
        return value.sum() / over(ByName(labels))


def total(terms: Mapping[str, Tensor]) -> Tensor:
    """Their sum, []."""
    first, *others = terms.values()
    return sum(others, first)


def samples_of(outputs: Outputs, labels: Labels) -> int:
    """Of which a model gave these outputs."""
    several = (*labels.values(), *named(outputs).values())
    return next((len(one) for one in several if one.ndim), 1)


def named(outputs: Outputs) -> Mapping[str, Tensor]:
    """What a model gives by name; its only tensor has an empty one."""
    return {_ONLY: outputs} if isinstance(outputs, Tensor) else outputs


def as_given(outputs: Mapping[str, Tensor]) -> Outputs:
    """The other way round."""
    return outputs.get(_ONLY, outputs)


def check_rows(outputs: Mapping[str, Tensor], samples: int) -> None:
    """Refuse outputs that a loss of whole batches cannot be taken of.

    Raises:
        ObjectiveError: one has a first axis that is not the samples'.
    """
    for name, output in outputs.items():
        if output.ndim and len(output) != samples:
            raise ObjectiveError(
                f"the model gives{f' {name!r}' if name else ''} {list(output.shape)} for {samples} "
                "samples; expected a row for each, or [], of a loss over whole batches"
            )


def _nothing(outputs: Outputs) -> Tensor:
    """0, of which all outputs have a gradient."""
    several = named(outputs).values()
    zeros = [output.sum() * 0.0 for output in several if output.is_floating_point()]
    return torch.stack(zeros).sum()
