"""What held-out data gave in the course of a training: the best so far, and whether that is all."""

import time
from collections.abc import Sequence

from chassis.aim import Aim
from chassis.interval import Interval
from protos.job_pb2 import ValidateSpec
from workers.model.saved.cut import Validated


class Validations:
    """Those of a training, in the order of its steps; the same on all of its workers.

    Args:
        spec: how the job would have them.
        done: so far.
    """

    def __init__(self, spec: ValidateSpec, done: Sequence[Validated] = ()) -> None:
        self._aim = Aim.of(spec.metric)
        self._patience = spec.patience
        self.done = tuple(done)

    def add(self, validated: Validated) -> None:
        """Take one in."""
        self.done = (*self.done, validated)

    @property
    def best(self) -> Validated | None:
        """The first of those with the best value; None where none has any."""
        number = self._best()
        return None if number is None else self.done[number]

    @property
    def is_over(self) -> bool:
        """Whether as many as the job has patience for were no better than one before them."""
        number = self._best()
        since = len(self.done) - (0 if number is None else number + 1)
        return 0 < self._patience <= since

    def _best(self) -> int | None:
        best, found = None, None
        for number, validated in enumerate(self.done):
            score = self._aim.score(validated.metrics)
            if score is not None and (best is None or score > best):
                best, found = score, number
        return found


class ValidationClock:
    """At the judge: after which steps held-out data is measured.

    Args:
        every: how often; after the last step, too. Empty: never.
        steps: of the training.
    """

    def __init__(self, every: str, steps: int) -> None:
        self._every = Interval.of(every) if every else Interval()
        self._steps = steps
        self._last = time.monotonic()

    def due(self, step: int) -> bool:
        """Once for each step, before it ends: whether it is measured with it and those before."""
        every, now = self._every, time.monotonic()
        if every.steps:
            return step == self._steps or step % every.steps == 0
        if not every.seconds or (step < self._steps and now - self._last < every.seconds):
            return False
        self._last = now
        return True

    def measured(self) -> None:
        """Held-out data was measured: time counts from now."""
        self._last = time.monotonic()
