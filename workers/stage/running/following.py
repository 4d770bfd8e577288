"""What follows the steps of one worker: validation, cuts, a pause, the end of the training.

Held-out data is measured on the weights and rows of just the steps so far. So a worker first
computes all steps that it has begun, or may begin, without those that are not applied yet: no
commit then waits for rows that somebody has still to pull. Then it applies none until all have
measured, have heard what came of it and, of the best so far, have taken a cut.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from chassis.aim import Aim
from protos.job_pb2 import TrainSpec
from protos.stage_pb2 import MEASURED, SETTLED
from workers.links.inbox import Inbox
from workers.links.notices import Notices
from workers.links.pipeline import Place
from workers.model.code.entry import ModelError
from workers.model.objective.metrics import JobMetrics
from workers.model.saved.cut import Validated
from workers.stage.cuts.judge import Moment
from workers.stage.cuts.part import Cuts
from workers.stage.cuts.validation import Validations
from workers.stage.report.progress import TRAIN, Progress
from workers.stage.rows.ahead import StageRows
from workers.stage.running.callbacks import Callbacks
from workers.stage.running.evaluation import Measured
from workers.stage.running.layers import StageLayers
from workers.stage.steps.verdict import AfterStep
from workers.stage.update.ending import Ending
from workers.stage.update.versions import Versions

_JUDGE = (0, 0)


class Following:
    """One worker's part in it.

    Args:
        metrics: that are measured of held-out data.
        steps: of the training.
        staleness: updates that a step lacks.
        cuts: where any are taken.
        validations: so far.
        known: what is measured again where the training begins: the state may be the best since.
        callbacks: at the worker that calls them.
        pending: what is to follow the steps that the training begins with.

    Attributes:
        pending: what is to follow the steps so far, once no other is under way.
        stopped: whether the training ends before its last step.
    """

    def __init__(
        self,
        train: TrainSpec,
        place: Place,
        layers: StageLayers,
        rows: StageRows,
        versions: Versions,
        ending: Ending,
        notices: Notices,
        inbox: Inbox,
        metrics: JobMetrics,
        steps: int,
        staleness: int,
        progress: Progress,
        cuts: Cuts | None,
        validations: Validations,
        known: Sequence[Validated],
        callbacks: Callbacks | None,
        *,
        pending: AfterStep,
    ) -> None:
        self._train = train
        self._place = place
        self._layers = layers
        self._rows = rows
        self._versions = versions
        self._ending = ending
        self._notices = notices
        self._inbox = inbox
        self._metrics = metrics
        self._steps = steps
        self._staleness = staleness
        self._progress = progress
        self._cuts = cuts
        self.validations = validations
        self._callbacks = callbacks
        self._known = {one.step: one.metrics for one in known}
        self.pending = pending
        self.stopped = validations.is_over and not pending

    @property
    def to_validate(self) -> bool:
        """Whether a generation that goes on from the steps so far begins with a validation.

        What came of one counts once a step after it is applied: workers that have heard of it, and
        others that have not, then go on alike.
        """
        last = self.validations.done[-1:]
        return AfterStep.VALIDATE in self.pending or any(
            one.step == self._progress.step for one in last
        )

    def ended(self, after: AfterStep) -> None:
        """A step was applied that this is to follow."""
        best = self._train.checkpoint.best and AfterStep.CUT in after
        if best or AfterStep.VALIDATE in after:
            self.pending = after

    def carry_out(
        self,
        after: AfterStep,
        evaluate: Callable[[str], Measured],
        pause: Callable[[], None],
    ) -> None:
        """Do what follows the steps so far; where held-out data is measured, none is under way.

        Args:
            evaluate: predicts the validation data, in a pass of this name.
            pause: waits until the inbox is closed.
        """
        found: Mapping[str, float] = {}
        best = False
        if self.pending:
            found = self._measured(evaluate)
        if AfterStep.VALIDATE in after:
            best = self._validated(found)
        if not self.stopped and (best or after & (AfterStep.CUT | AfterStep.PAUSE)):
            self._cut(found, settled=best)
        self.pending = AfterStep.NOTHING
        if AfterStep.PAUSE in after and not self.stopped:
            pause()

    def _validated(self, found: Mapping[str, float]) -> bool:
        """Tell all what was measured; whether it is the best so far, and more steps follow."""
        step, name = self._progress.step, Aim.of(self._train.validate.metric).name
        if self._place.leads:
            _require(found, name, "train.validate.metric")
            facts = json.dumps(self._known.get(step) or _finite(found))
            self._notices.tell(_JUDGE, MEASURED, step, facts=facts)
        if self._cuts is not None and self._cuts.judge is not None:
            facts = self._wait_for(MEASURED).facts
            self._cuts.judge.finish()  # it removes what no cut needs, before others write the next
            self._tell_others(MEASURED, facts)
        metrics: dict[str, float] = json.loads(self._wait_for(MEASURED).facts)
        self.validations.add(Validated(step, metrics))
        if self._place.leads:
            self._progress.validated = self.validations.done
        if self._cuts is not None and self._cuts.judge is not None:
            self._cuts.judge.validated()
        best = self.validations.best
        self.stopped = self.validations.is_over and step < self._steps
        return best is not None and best.step == step < self._steps

    def _cut(self, metrics: Mapping[str, float], *, settled: bool) -> None:
        """Take a cut after the step that has just ended, as all workers do.

        Args:
            metrics: of the validation data, where the job would have them.
            settled: wait until it is complete: there will be no other of the best state.
        """
        assert self._cuts is not None
        progress, judge = self._progress, self._cuts.judge
        if settled:
            self._ending.flush()  # with the commits that a cut before may hold back
        moment = Moment(
            progress.step,
            progress.samples,
            self._ending.applied,
            self._ending.scales(progress.step),
            progress.curve.copy(),
            progress.before_s + progress.train_seconds,
            self.validations.done,
        )
        self._cuts.take(moment, metrics)
        if not settled:
            return
        if judge is not None:
            judge.require(progress.step)
            self._notices.tell(_JUDGE, SETTLED, progress.step)
            self._tell_others(SETTLED, "")
        self._wait_for(SETTLED)

    def _measured(self, evaluate: Callable[[str], Measured]) -> Mapping[str, float]:
        """The metrics of the validation data, at the last stage's leader; elsewhere none."""
        step = self._progress.step
        self._versions.use_newest(step)
        if self._rows.layers:
            self._rows.order.wait_to_pull(step + self._staleness)  # until all commits are in
        module, statistics = self._layers.graph.module, self._layers.statistics
        with statistics.as_of(step), _unchanged(module), self._ending.averaged():
            measured = evaluate(f"valid@{step}")
        self._layers.group.barrier()  # before this worker commits what others must not see yet
        self._progress.phase = TRAIN
        if not self._place.leads:
            return {}
        found = self._metrics.measure(measured.found, "valid")
        if best := self._train.checkpoint.best:
            _require(found, Aim.of(best).name, "train.checkpoint.best")
        self._progress.metrics = _finite(found)
        if self._callbacks is not None:
            self._callbacks.measured(found)
        return found

    def _tell_others(self, kind: Any, facts: str) -> None:
        for stage, width in enumerate(self._place.widths):
            for rank in range(width):
                if (stage, rank) != _JUDGE:
                    self._notices.tell((stage, rank), kind, self._progress.step, facts=facts)

    def _wait_for(self, kind: Any) -> Any:
        board, step = self._notices.board, self._progress.step
        self._inbox.wait(lambda: board.has(kind, step))
        (notice,) = board.of(kind, step).values()
        return notice


def _finite(found: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _require(found: Mapping[str, float], name: str, key: str) -> None:
    """Refuse a metric that the job does not measure.

    Raises:
        ModelError: naming those that it does.
    """
    if name not in found:
        raise ModelError(f"{key}: {name!r} is not measured; expected one of {', '.join(found)}")


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Afterwards the module trains on, with the buffers that it had."""
    before: list[tuple[nn.Module, str, Tensor, Tensor]] = [
        (child, name, buffer, buffer.clone())
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and buffer.layout == torch.strided
    ]
    try:
        yield
    finally:
        module.train()
        for child, name, buffer, kept in before:
            child._buffers[name] = buffer
            if not torch.equal(buffer, kept):  # who counts changes is to see none
                buffer.copy_(kept)
