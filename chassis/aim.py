"""A metric of held-out data, and which way is better."""

from collections.abc import Mapping
from dataclasses import dataclass

_GREATER = ("auc", "accuracy")  # what metrics end in that are better when greater


@dataclass(frozen=True, slots=True)
class Aim:
    """A metric, and which way is better.

    Attributes:
        name: of the metric.
        greater: whether a greater value is better.
    """

    name: str
    greater: bool

    @classmethod
    def of(cls, text: str) -> "Aim":
        """Read `valid_auc`, `max:NAME` or `min:NAME`."""
        direction, _, name = text.rpartition(":")
        return cls(name, direction == "max" or (not direction and name.endswith(_GREATER)))

    def score(self, metrics: Mapping[str, float]) -> float | None:
        """The metric, turned so that more is better; None where it is not there."""
        value = metrics.get(self.name)
        return value if value is None or self.greater else -value
