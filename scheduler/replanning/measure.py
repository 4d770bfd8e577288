"""What a running plan takes, filtered over windows of its run: what re-planning rests on.

The filter works on the logarithm of seconds a sample, so that twice as slow and twice as fast
weigh the same, and a ratio to any prediction is filtered alike:

- The first window of a worker is left out: it holds allocation and cold caches.
- Nothing counts before `MIN_WINDOWS` windows; their median starts the estimate.
- From then on the estimate moves by `GAIN` times the window's deviation, an exponentially weighted
  mean with a half-life of `HALF_LIFE` windows. A deviation beyond a factor of `CLIP` counts as
  that factor, so that no single window moves the estimate by more than `CLIP ** GAIN` (3.4 %).
"""

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protos import scheduler_pb2 as pb
from scheduler.problem import mapper

if TYPE_CHECKING:
    from scheduler.decision.record import Measured

MIN_WINDOWS = 5
HALF_LIFE = 8.0
GAIN = 1.0 - 2.0 ** (-1.0 / HALF_LIFE)
CLIP = 1.5
WINDOW_S = 1.9  # workers report every 2 s or more often
WINDOW_STEPS = 4  # a report can fall inside a step: few of them would tell its phase, not its time


@dataclass(frozen=True, slots=True)
class Filtered:
    """Seconds a sample over `windows` windows; `spread` is a window's typical deviation, relative.

    `seconds` is 0 while there are fewer than `MIN_WINDOWS`.
    """

    windows: int = 0
    seconds: float = 0.0
    spread: float = 0.0

    @property
    def counts(self) -> bool:
        """Whether there were windows enough to act on."""
        return self.windows >= MIN_WINDOWS and self.seconds > 0

    @property
    def error(self) -> float:
        """Standard error of the logarithm of `seconds`; infinite while it does not count.

        A window's standard deviation is sqrt(pi / 2) times its mean absolute one. The filter's
        variance is that of the first windows' median, as far as they weigh still, and that of an
        exponentially weighted mean of the later ones, of a window's.
        """
        if not self.counts:
            return math.inf
        first = (1.0 - GAIN) ** (2 * (self.windows - MIN_WINDOWS))
        variance = first * math.pi / 2 / MIN_WINDOWS + (1.0 - first) * GAIN / (2.0 - GAIN)
        return math.log1p(self.spread) * math.sqrt(math.pi / 2 * variance)


@dataclass(slots=True)
class LogFilter:
    """The filter of this module, over positive values of any unit."""

    windows: int = 0
    _level: float = 0.0
    _spread: float = 0.0
    _first: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Take in a window.

        Raises:
            ValueError: `value` is not finite or not above 0.
        """
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"value: {value!r}: expected a finite number above 0")
        self.windows += 1
        log = math.log(value)
        if self.windows <= MIN_WINDOWS:
            self._first.append(log)
            if self.windows == MIN_WINDOWS:
                self._level = statistics.median(self._first)
                self._spread = statistics.fmean(abs(one - self._level) for one in self._first)
                self._first.clear()
            return
        most = math.log(CLIP)
        deviation = min(most, max(-most, log - self._level))
        self._level += GAIN * deviation
        self._spread += GAIN * (abs(deviation) - self._spread)

    @property
    def filtered(self) -> Filtered:
        """The estimate so far."""
        if self.windows < MIN_WINDOWS:
            return Filtered(self.windows)
        return Filtered(self.windows, math.exp(self._level), math.expm1(self._spread))


@dataclass(frozen=True, slots=True)
class Measurement:
    """A run's busy seconds a sample by stage, and the whole pipeline's seconds a sample."""

    busy: tuple[Filtered, ...] = ()
    pace: Filtered = Filtered()

    @classmethod
    def of_run(cls, measured: "Measured") -> "Measurement":
        """An ended run's means; it counts as many windows as these were taken over."""
        windows = int((measured.throughput_s or measured.seconds) / WINDOW_S)

        def mean(seconds: float) -> Filtered:
            return Filtered(windows, seconds) if seconds > 0 else Filtered()

        return cls(
            tuple(mean(seconds) for seconds in measured.stage_s),
            mean(1.0 / measured.throughput if measured.throughput > 0 else 0.0),
        )

    @classmethod
    def from_message(cls, message: pb.Measurement) -> "Measurement":
        """Return the measurement that a message holds."""
        return mapper.from_fields(cls, mapper.of_message(message))

    def to_message(self) -> pb.Measurement:
        """Return the message of the same content."""
        return pb.Measurement(**mapper.to_fields(self))

    @property
    def counts(self) -> bool:
        """Whether any part of it may be acted on."""
        return any(one.counts for one in (*self.busy, self.pace))


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a worker was: its steps, samples over all workers, seconds computing and training.

    `train_s` are the seconds until the last of these steps ended.
    """

    step: int
    samples: int
    busy_s: float
    train_s: float


@dataclass(frozen=True, slots=True)
class Steady:
    """The mean of the steps that came after the first window; none where `steps` is 0."""

    steps: int = 0
    samples_per_s: float = 0.0


class Windows:
    """Cuts workers' progress into windows and filters them.

    A stage's figure is that of its first worker, which has the most micro-batches and waits for
    the others where gradients are reduced. Not safe for use from many threads.
    """

    def __init__(self, stages: int) -> None:
        self._marks: list[Mark | None] = [None] * stages
        self._warm = [False] * stages
        self._busy = [LogFilter() for _ in range(stages)]
        self._pace = LogFilter()
        self._steady: tuple[Mark, Mark] | None = None  # the last stage's, first and last

    def add(self, stage: int, mark: Mark) -> None:
        """Take in the progress of the first worker of `stage`; too short a window is left open."""
        if not 0 <= stage < len(self._marks) or mark.train_s <= 0:
            return
        before = self._marks[stage]
        if before is None or mark.step < before.step:  # it began, or began again
            self._marks[stage], self._warm[stage] = mark, False
            if stage == len(self._marks) - 1:
                self._steady = None
            return
        if self._steady is not None and stage == len(self._marks) - 1:
            self._steady = self._steady[0], mark
        seconds, samples = mark.train_s - before.train_s, mark.samples - before.samples
        if seconds < WINDOW_S or mark.step - before.step < WINDOW_STEPS or samples <= 0:
            return
        self._marks[stage] = mark
        if not self._warm[stage]:
            self._warm[stage] = True
            if stage == len(self._marks) - 1:
                self._steady = mark, mark
            return
        busy_s = mark.busy_s - before.busy_s
        if busy_s > 0:
            self._busy[stage].add(busy_s / samples)
        if stage == len(self._marks) - 1:
            self._pace.add(seconds / samples)

    @property
    def measurement(self) -> Measurement:
        """What has been measured so far."""
        return Measurement(tuple(one.filtered for one in self._busy), self._pace.filtered)

    @property
    def steady(self) -> Steady:
        """What the pipeline came to once it ran evenly."""
        if self._steady is None:
            return Steady()
        first, last = self._steady
        steps, seconds = last.step - first.step, last.train_s - first.train_s
        if steps <= 0 or seconds <= 0:
            return Steady()
        return Steady(steps, (last.samples - first.samples) / seconds)
