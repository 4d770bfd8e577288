"""A table of plain Python that counts: who has a row, since when, and who loses it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps import Admission, Eviction, Score

Row = NDArray[np.float32]


@dataclass
class Key:
    """What is known of one key; without a row it waits for admission."""

    shows: np.float32 = field(default_factory=lambda: np.float32(0))
    clicks: np.float32 = field(default_factory=lambda: np.float32(0))
    count: int = 0
    step: int = 0
    row: Row | None = None


@dataclass
class CountedTable:
    """Rows under SGD.

    Args:
        first: what the row of a key begins as.
    """

    learning_rate: float
    first: Callable[[int], Row]
    eviction: Eviction
    score: Score | None = None
    admission: Admission | None = None
    keys: dict[int, Key] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Of the table that this one is held against."""
        return {
            "optimizer": "sgd",
            "learning_rate": self.learning_rate,
            "eviction": self.eviction,
            "score": self.score,
            "admission": self.admission,
        }

    def push(
        self, step: int, gradients: Mapping[int, Row], usage: Mapping[int, tuple[float, float]]
    ) -> None:
        """A step's gradient of each of its keys, with shows and clicks."""
        for number, gradient in gradients.items():
            key = self.keys.setdefault(number, Key())
            shows, clicks = usage.get(number, (1.0, 0.0))
            key.shows += np.float32(shows)
            key.clicks += np.float32(clicks)
            key.count += int(max(1, shows))
            key.step = step
            if key.row is None:
                if not self._admits(key):
                    continue
                key.row = self.first(number).astype(np.float32)
            key.row = key.row - np.float32(self.learning_rate) * gradient

    def shrink(self, step: int) -> None:
        """What follows a step: scores decay, then rules apply."""
        rules = self.eviction
        for number, key in list(self.keys.items()):
            if self.score is not None:
                key.shows *= np.float32(self.score.decay)
                key.clicks *= np.float32(self.score.decay)
            old = bool(rules.ttl_steps) and step - key.step > rules.ttl_steps
            low = rules.min_score > 0 and key.row is not None and self._score(key) < rules.min_score
            if old or low:
                del self.keys[number]

    def end_step(self, step: int) -> None:
        """As `Eviction.every_steps` has it."""
        every = self.eviction.every_steps
        if every and (step + 1) % every == 0:
            self.shrink(step)

    @property
    def rows(self) -> dict[int, Row]:
        """Those there are."""
        return {number: key.row for number, key in self.keys.items() if key.row is not None}

    @property
    def waiting(self) -> int:
        """Keys that have been counted and have no row."""
        return sum(key.row is None for key in self.keys.values())

    def _score(self, key: Key) -> np.float32:
        assert self.score is not None
        cold, hot = np.float32(self.score.non_click), np.float32(self.score.click)
        return np.float32(cold * (key.shows - key.clicks) + hot * key.clicks)

    def _admits(self, key: Key) -> bool:
        if self.admission is None:
            return True
        reached = key.count if self.admission.kind == "count" else self._score(key)
        return bool(reached >= self.admission.threshold)
