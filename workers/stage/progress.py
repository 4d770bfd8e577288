"""How far a worker is."""

import time
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Written by the executor, read by the reporting thread.

    Attributes:
        step: how many steps have ended; when the last one did is noted.
        began, ended: of training, `time.perf_counter`.
    """

    phase: str = "start"
    samples: int = 0
    losses: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    _last: tuple[int, float] = (0, 0.0)

    @property
    def step(self) -> int:
        """How many steps have ended."""
        return self._last[0]

    @step.setter
    def step(self, number: int) -> None:
        self._last = number, time.perf_counter()

    @property
    def stepped_s(self) -> float:
        """Seconds of training until the last step ended."""
        number, when = self._last
        return when - self.began if number else 0.0

    @property
    def train_seconds(self) -> float:
        """Wall time of training so far."""
        return (self.ended or time.perf_counter()) - self.began if self.began else 0.0
