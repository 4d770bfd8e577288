"""How far a worker is."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.scheduler_pb2 import CutList
from workers.model.cut import Validated

TRAIN = "train"
PAUSED = "paused"


@dataclass
class Progress:
    """Written by the executor, read by the reporting thread.

    Attributes:
        step: how many steps have ended; when the last one did is noted.
        began, ended: of training, `time.perf_counter`.
        before_s: of training, by attempts that this one goes on from.
        cuts: those that are kept, where this worker takes them; another object when they change.
        cuts_told: the last ones that the scheduler has answered for: what a later attempt may be
            told to go on from, so that none of these may go; None before it has.
        metrics: of the validation data, at the last stage's leader when it was measured last.
        validated: what `train.validate` gave so far, there too.
        pause_asked: all are to wait, after a step that a cut follows.
    """

    phase: str = "start"
    samples: int = 0
    losses: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    before_s: float = 0.0
    cuts: CutList | None = None
    cuts_told: CutList | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    validated: Sequence[Validated] = ()
    pause_asked: threading.Event = field(default_factory=threading.Event)
    _last: tuple[int, float] = (0, 0.0)

    def resume(self, step: int, samples: int, losses: Sequence[float], seconds: float) -> None:
        """Begin at a step, with what was reached until then."""
        self._last = step, 0.0
        self.samples, self.losses, self.before_s = samples, list(losses), seconds

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
        _, when = self._last
        return when - self.began if when else 0.0

    @property
    def train_seconds(self) -> float:
        """Wall time of training so far."""
        return (self.ended or time.perf_counter()) - self.began if self.began else 0.0
