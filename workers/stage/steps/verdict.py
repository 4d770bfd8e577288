"""What becomes of a step: applied, skipped, or the end of a training that diverged or is to stop.

The leader of each stage (rank 0) reports on its stage's gradient of the whole batch. The judge, the
leader of the first stage, which is the last to finish a step anyway, decides for all of them.
Nobody changes weights or rows before.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntFlag, auto

from workers.learning.precision import LossScale
from workers.model.saved.cut import ScaleState

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Outcome(Enum):
    """What becomes of a step."""

    APPLY = auto()
    SKIP = auto()
    DIVERGED = auto()
    STOP = auto()


class AfterStep(IntFlag):
    """What follows a step, as its judge has decided."""

    NOTHING = 0
    CUT = 1
    PAUSE = 2  # a cut, and all wait there
    VALIDATE = 4  # before either


@dataclass(frozen=True, slots=True)
class Report:
    """A stage's word on a step.

    Args:
        squared_norm: of its gradient, rows included; 0 where nothing is clipped.
        finite: whether all of the gradient is.
        loss: of the step, in the last stage; 0 elsewhere. NaN where an auxiliary one is not finite.
        after: what one of the stage's workers would have follow the step.
        losses: all that was summed of them; where they were told to another stage none.
        stop: whether one of the stage's workers would have the training end before the step.
    """

    squared_norm: float
    finite: bool
    loss: float = 0.0
    after: AfterStep = AfterStep.NOTHING
    losses: tuple[float, ...] = ()
    stop: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a step.

    Args:
        scale: by which gradients are to be multiplied.
    """

    outcome: Outcome
    scale: float = 1.0


class LossScales:
    """The loss scale of every step: what the verdicts until then made of it.

    A step's scale is that after the verdicts of all steps that it does not lack, so that it depends
    on the staleness and never on timing.

    Args:
        scale: of the first step; None: losses are not scaled.
    """

    def __init__(self, scale: LossScale | None, staleness: int) -> None:
        self._scale = scale
        self._staleness = staleness
        self._judged = 0
        self._values = dict.fromkeys(range(staleness + 1), scale.value if scale else 1.0)

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled at all."""
        return self._scale is not None

    def of(self, step: int) -> float:
        """The scale of a step, of those whose verdict is awaited and those that may be computed."""
        return self._values[step]

    def state(self, step: int) -> ScaleState | None:
        """All of it, once the verdicts of the steps before this one are in."""
        if self._scale is None:
            return None
        steps = tuple(self._values[step + more] for more in range(self._staleness + 1))
        return ScaleState(self._scale.value, self._scale.good, steps)

    def resume(self, step: int, state: ScaleState | None) -> None:
        """Begin at a step; of another staleness the last scale holds on, or the last are left."""
        values = [self._values[0]] * (self._staleness + 1)
        if self._scale is not None and state is not None:
            self._scale.value, self._scale.good = state.value, state.good
            more = [state.value] * len(values)
            values = [*state.steps, *more][: len(values)]
        self._values = {step + number: value for number, value in enumerate(values)}

    def judged(self, step: int, outcome: Outcome) -> None:
        """Take in a step's verdict; they come in order."""
        if self._scale is not None:
            self._scale.update(outcome is Outcome.APPLY)
        del self._values[step]
        self._values[step + 1 + self._staleness] = self._scale.value if self._scale else 1.0


def judge(reports: Iterable[Report], clip: float, loss_scale: float, *, scaled: bool) -> Verdict:
    """The verdict on a step from the reports of all stages.

    A loss that is not finite is no matter of the loss scale, which follows it.

    Args:
        clip: greatest norm of the gradient, as of `torch.nn.utils.clip_grad_norm_`; 0: any.
        loss_scale: that the gradients are multiplied by.
        scaled: whether a gradient that is not finite may become so by a smaller loss scale.
    """
    reports = list(reports)
    if any(report.stop for report in reports):
        return Verdict(Outcome.STOP)
    finite = all(report.finite for report in reports)
    if not all(math.isfinite(report.loss) for report in reports):
        return Verdict(Outcome.DIVERGED)
    if not finite:
        may_skip = scaled and loss_scale > LossScale.LEAST
        return Verdict(Outcome.SKIP if may_skip else Outcome.DIVERGED)
    scale = 1.0 / loss_scale
    if clip > 0:
        norm = math.sqrt(sum(report.squared_norm for report in reports)) / loss_scale
        scale *= min(1.0, clip / (norm + _TINY))
    return Verdict(Outcome.APPLY, scale)
