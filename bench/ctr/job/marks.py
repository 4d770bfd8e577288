"""Notes when the steps of a training were over, on the clock that all processes share."""

import time
from pathlib import Path

from heterps import TrainingState


class Marks:
    """Writes the times into a file once training is over."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._at: list[float] = []

    def on_step(self, state: TrainingState) -> None:
        self._at.append(time.monotonic())

    def on_end(self, state: TrainingState) -> None:
        self._path.write_text("\n".join(map(repr, self._at)))
