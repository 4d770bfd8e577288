"""How far a worker is."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from protos.scheduler_pb2 import CutList
from workers.model.objective.curve import LossCurve
from workers.model.saved.cut import Validated

TRAIN = "train"
PAUSED = "paused"


@dataclass
class Progress:
    """Written by the executor, read by the reporting thread.

    Attributes:
        step: how many steps have ended; when the last one did is noted.
        curve: the losses of these, in the last stage.
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
    curve: LossCurve = field(default_factory=LossCurve)
    busy_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    before_s: float = 0.0
    cuts: CutList | None = None
    cuts_told: CutList | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    validated: Sequence[Validated] = ()
    pause_asked: threading.Event = field(default_factory=threading.Event)
    _last: tuple[int, float] = (0, 0.0)  # step, and seconds of training until it ended
    _apart: tuple[float, float] = (0.0, 0.0)  # seconds, and since when it goes on; 0: it does not

    def resume(self, step: int, samples: int, curve: LossCurve, seconds: float) -> None:
        """Begin at a step, with what was reached until then."""
        self._last = step, 0.0
        self.samples, self.curve, self.before_s = samples, curve.copy(), seconds

    @property
    def losses(self) -> list[float]:
        """Of the steps that have ended, in the last stage."""
        return self.curve.losses

    @property
    def step(self) -> int:
        """How many steps have ended."""
        return self._last[0]

    @step.setter
    def step(self, number: int) -> None:
        self._last = number, self.train_seconds

    @property
    def stepped_s(self) -> float:
        """Seconds of training until the last step ended."""
        return self._last[1]

    @property
    def train_seconds(self) -> float:
        """Wall time of training so far, without what was apart from it."""
        if not self.began:
            return 0.0
        return (self.ended or time.perf_counter()) - self.began - self.apart_s

    @property
    def apart_s(self) -> float:
        """Wall time so far of what was apart from training, before it was over."""
        seconds, since = self._apart
        return seconds + ((self.ended or time.perf_counter()) - since if since else 0.0)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What passes inside, such as a validation, is no training."""
        seconds, since = self._apart[0], time.perf_counter()
        self._apart = seconds, since
        try:
            yield
        finally:
            self._apart = seconds + time.perf_counter() - since, 0.0
