"""How far a worker is."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Written by the executor, read by the reporting thread."""

    phase: str = "start"
    step: int = 0
    samples: int = 0
    losses: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    @property
    def train_seconds(self) -> float:
        """Wall time of training so far."""
        return (self.ended or time.perf_counter()) - self.began if self.began else 0.0
