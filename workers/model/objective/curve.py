"""The losses of a training's steps, and of each the terms that it is the sum of."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

_LOSSES = "losses"  # of the tensors that a curve is kept as; terms are LOSSES/TERM


@dataclass(slots=True)
class LossCurve:
    """What has been trained so far.

    Attributes:
        losses: of each step, the sum of its terms.
        terms: of each step those that have a name; 0 where a step had none of that name.
    """

    losses: list[float] = field(default_factory=list)
    terms: dict[str, list[float]] = field(default_factory=dict)

    def add(self, loss: float, terms: Mapping[str, float]) -> None:
        """Take in the next step."""
        for name in terms.keys() - self.terms.keys():
            self.terms[name] = [0.0] * len(self.losses)
        self.losses.append(loss)
        for name, values in self.terms.items():
            values.append(terms.get(name, 0.0))

    def copy(self) -> "LossCurve":
        """One that stays as it is."""
        return LossCurve(list(self.losses), {name: list(v) for name, v in self.terms.items()})

    def tensors(self) -> dict[str, Tensor]:
        """As tensors by name, float64 [steps] each."""
        named = {_LOSSES: self.losses, **{f"{_LOSSES}/{n}": v for n, v in self.terms.items()}}
        return {name: torch.tensor(values, dtype=torch.float64) for name, values in named.items()}

    @staticmethod
    def take(tensors: dict[str, Tensor]) -> "LossCurve":
        """Take out of tensors what `tensors` made.

        Raises:
            KeyError: it is not there.
        """
        losses: list[float] = tensors.pop(_LOSSES).tolist()
        names = sorted(name for name in tensors if name.startswith(f"{_LOSSES}/"))
        terms = {name.removeprefix(f"{_LOSSES}/"): tensors.pop(name).tolist() for name in names}
        return LossCurve(losses, terms)

    def recent(self, steps: int) -> tuple[float, dict[str, float]]:
        """Mean loss and terms of the last so many steps; 0 of none."""
        count = min(steps, len(self.losses)) or 1
        terms = {name: sum(values[-steps:]) / count for name, values in self.terms.items()}
        return sum(self.losses[-steps:]) / count, terms

    def as_csv(self) -> str:
        """The text of loss.csv: a line a step, counted from 1."""
        names = sorted(self.terms)
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["step", "loss", *(f"loss_{name}" for name in names)])
        columns = [self.losses, *(self.terms[name] for name in names)]
        for step, values in enumerate(zip(*columns, strict=True), 1):
            writer.writerow([step, *(f"{value:.9g}" for value in values)])
        return stream.getvalue()
