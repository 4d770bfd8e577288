"""How a step ends: its gradient summed, measured and judged, and then applied.

Sums and what is told of them take a thread of their own, one step after the other, while the worker
computes the next steps; where these wait for the verdict, the worker has nothing else to do and
needs no thread. The judge, the leader of the first stage, hears the leaders of all stages
and tells them the verdict; they tell their workers (`workers/stage/steps/verdict.py`). Where all
that counts is in the sums of the only stage, every worker comes to the same verdict by itself.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from protos import stage_pb2
from protos.job_pb2 import JobSpec
from protos.stage_pb2 import JUDGED, REPORTED, Notice
from workers.errors import DivergedError
from workers.learning.optimizers import rate_factor
from workers.links.inbox import Inbox
from workers.links.notices import Address, Notices
from workers.links.pipeline import Place
from workers.model.saved.cut import ScaleState
from workers.stage.rows.ahead import PulledRows
from workers.stage.rows.commits import RowCommits, largest
from workers.stage.rows.verdicts import RowVerdicts
from workers.stage.steps.stop import Stop
from workers.stage.steps.verdict import AfterStep, LossScales, Outcome, Report, Verdict, judge
from workers.stage.update.loss_terms import LossTerms
from workers.stage.update.update import Gradient, Update

_log = logging.getLogger("heterps.stage")
_JUDGE = (0, 0)
_ON_WIRE = {
    Outcome.APPLY: stage_pb2.APPLY,
    Outcome.SKIP: stage_pb2.SKIP,
    Outcome.DIVERGED: stage_pb2.DIVERGED,
    Outcome.STOP: stage_pb2.STOP,
}
_FROM_WIRE = {number: outcome for outcome, number in _ON_WIRE.items()}


class _DroppedError(Exception):
    """A step has no verdict: training is over before it."""


@dataclass(frozen=True, slots=True)
class _Judged:
    verdict: Verdict
    loss: float
    terms: Mapping[str, float]
    after: AfterStep


@dataclass(frozen=True, slots=True)
class Ended:
    """A step that is over.

    Attributes:
        loss: in the last stage.
        terms: of that those that have a name.
        after: what follows.
    """

    loss: float
    terms: Mapping[str, float]
    after: AfterStep


class Ending:
    """The ends of one worker's steps, in their order.

    Args:
        update: of the stage's dense parameters.
        commits: of its rows.
        scales: of the loss.
        inbox: through which waiting threads are woken, and ended.
        steps: of the training, for the rows' learning rates.
        staleness: updates that a step lacks.
        terms: of the loss.
        stop: whether the training is to end before its last step.
        due: at the judge, asked once for each step: what is to follow it.
        at_once: whether a gradient can be read without waiting for a device.
    """

    def __init__(
        self,
        job: JobSpec,
        place: Place,
        update: Update,
        commits: RowCommits,
        scales: LossScales,
        notices: Notices,
        inbox: Inbox,
        steps: int,
        staleness: int,
        terms: LossTerms,
        stop: Stop,
        *,
        due: Callable[[int], AfterStep],
        at_once: bool,
    ) -> None:
        self._place = place
        self._update = update
        self._commits = commits
        self._scales = scales
        self._notices = notices
        self._inbox = inbox
        self._clip = job.train.clip
        self._rows = job.train.rows
        self._steps = steps
        self._staleness = staleness
        self._terms = terms
        self._stop = stop
        tallied = self._clip > 0 and commits.any
        self._judges = len(place.widths) == 1 and (place.width == 1 or not tallied)
        self._thread = (
            None
            if at_once and not tallied and (not staleness or place.widths == (1,))
            else ThreadPoolExecutor(1, thread_name_prefix="ending")
        )
        self._begun: deque[tuple[Gradient, Future[_Judged]]] = deque()
        # Whose verdict is not known here.
        self._reported: tuple[Gradient, Report, Mapping[str, float]] | None = None
        self._next = 0  # step to begin
        self._over = False  # whether the steps after those applied are given up
        self._row_verdicts = RowVerdicts(commits, job.train.rows, steps)
        self._due = due
        self.applied = 0  # updates that count
        # On the last steps taken here: what those commit anew who take over from this worker.
        self.judged: deque[Notice] = deque(maxlen=staleness + 2)

    def loss_scale(self, step: int) -> float:
        """By which the loss of a step under way is multiplied."""
        return self._scales.of(step)

    def watch(self, step: int) -> None:
        """The backward that follows is this worker's last of a step: sums begin while it runs."""
        self._update.watch(step)

    def resume(self, step: int, applied: int, scales: ScaleState | None) -> None:
        """Begin at a step.

        Args:
            step: how many were taken.
            applied: those that were not skipped.
            scales: of the loss, as of `scales`.
        """
        self._next, self.applied = step, applied
        self._row_verdicts.resume(step, applied)
        self._scales.resume(step, scales)

    def scales(self, step: int) -> ScaleState | None:
        """How far the loss scale is once the steps before this one are over."""
        return self._scales.state(step)

    def begin(
        self, step: int, loss: Tensor, terms: Mapping[str, Tensor], rows: list[PulledRows]
    ) -> None:
        """All that this worker has to give to a step is there.

        Args:
            loss: float64 [], this worker's part.
            terms: of that those that have a name, float64 [] each.
            rows: that collected their gradients.
        """
        self._next, self._loss = step + 1, loss
        of_rows = largest(rows)
        self._commits.gather(step, rows)
        losses = self._terms.to_sum(step, loss, terms)
        gradient = self._update.gather(
            step, losses, of_rows, after=self._due(step), stop=self._stop.is_due(step)
        )
        future: Future[_Judged] = Future()
        if self._thread is not None:
            future = self._thread.submit(self._end, gradient)
            future.add_done_callback(lambda done: self._heard(step, done))
        elif self._place.widths == (1,):
            future.set_result(self._end(gradient))
        self._begun.append((gradient, future))

    def settle(self) -> None:
        """Wait for the verdict on the step that has begun to end, where no thread does."""
        if self._thread is None and self._begun and not self.ready:
            gradient, future = self._begun[0]
            future.set_result(self._end(gradient))

    def in_doubt(self, step: int) -> bool:
        """Whether all there is to a step is here but the verdict, which others may have.

        Args:
            step: the first that was not applied here.
        """
        if self._reported is None or self._commits.goes_alone:
            return False
        gradient, *_ = self._reported
        return gradient.step == step

    def hear(self, notice: Notice) -> None:
        """Have the verdict on the step in doubt be that which others had; nobody waits any more."""
        assert self._reported is not None
        gradient, report, terms = self._reported
        verdict = Verdict(_FROM_WIRE[notice.outcome], notice.scale)
        future: Future[_Judged] = Future()
        future.set_result(_Judged(verdict, report.loss, terms, AfterStep(notice.after)))
        self._begun = deque([(gradient, future)])

    @property
    def ready(self) -> bool:
        """Whether the verdict on the next step is here."""
        return bool(self._begun) and self._begun[0][1].done()

    def apply(self) -> Ended | None:
        """Carry out the verdict on the next step; None: training ends before it.

        Raises:
            DivergedError: the training is over. The step has changed nothing.
        """
        gradient, future = self._begun.popleft()
        judged, step = future.result(), gradient.step
        verdict = judged.verdict
        if verdict.outcome is Outcome.STOP:
            self._stop.heard = True
            return None
        outcome = _ON_WIRE[verdict.outcome]
        notice = Notice(kind=JUDGED, step=step, outcome=outcome, scale=verdict.scale)
        notice.after = judged.after
        self.judged.append(notice)
        self._scales.judged(step, verdict.outcome)
        if self._reported is not None and self._reported[0] is gradient:
            self._reported = None
        if verdict.outcome is Outcome.DIVERGED:
            raise DivergedError(
                f"step {step}: a loss or gradient is not finite; the model is kept as it was before"
            )
        self._take_rows(step, judged, early=False)
        if verdict.outcome is Outcome.APPLY:
            self._update.apply(gradient, verdict.scale)
            self.applied += 1
        else:
            _log.info("step %d skipped: beyond float16", step)
            self._update.skip(gradient)
        self._notices.board.forget_before(step - self._staleness)
        return Ended(judged.loss, judged.terms, judged.after)

    def take_over(self, series: Sequence[str], judged: Sequence[Notice], step: int) -> None:
        """At a stage's leader: as of `RowCommits.take_over`, before the first step of these."""
        rates, applied = list[float](), self.applied
        for notice in reversed(judged):
            applied -= notice.outcome == stage_pb2.APPLY
            rates.append(rate_factor(self._rows, applied, self._steps))
        self._commits.take_over(series, judged, rates[::-1], step)

    def averaged(self) -> AbstractContextManager[None]:
        """As of `Update`."""
        return self._update.averaged()

    def check(self) -> None:
        """Raise what failed in the background, or that another worker of the stage is gone."""
        self._commits.check()
        self._notices.check()
        self._update.check()  # one that hangs may never send what this waits for

    def flush(self) -> None:
        """Wait until all that was applied is in the tables, and known."""
        self._commits.flush()
        self._notices.flush()

    def abandon(self, end: int) -> None:
        """Give up the steps after those applied, as all workers do, once what was applied is kept.

        Args:
            end: the first step of which no worker can have begun the sums.
        """
        self._over = True
        self._inbox.wake()
        if self._thread is not None:
            for _, future in self._begun:  # whose sums others wait for, too
                failed = future.exception()
                if failed is not None and not isinstance(failed, _DroppedError):
                    raise failed
        for step in range(self._next, end):  # others may have, and wait for ours
            none = self._terms.to_sum(step, torch.zeros_like(self._loss), {})
            self._update.gather(step, none, None).sums.wait()
        self._commits.no_more_pulls()
        self.flush()
        self._begun.clear()  # who gives up later on takes none of them

    def give_up(self) -> None:
        """From now on verdicts change nothing before they are applied."""
        self._row_verdicts.give_up()

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _heard(self, step: int, future: Future[_Judged]) -> None:
        """The thread has the verdict on a step, or has failed."""
        if not future.cancelled() and future.exception() is None:
            self._take_rows(step, future.result(), early=True)
        self._inbox.wake()

    def _take_rows(self, step: int, judged: _Judged, *, early: bool) -> None:
        self._row_verdicts.take(step, judged.verdict, last=bool(judged.after), early=early)

    def _end(self, gradient: Gradient) -> _Judged:
        step = gradient.step
        # All sums are complete after all parts are staged, so that none can be lacking once
        # somebody has applied the step.
        self._wait(lambda: self._commits.is_staged(step))
        report = self._update.report(gradient)
        if self._place.rank == 0:
            squared, finite = self._commits.squared_norm(step)
            report = replace(
                report,
                squared_norm=report.squared_norm + squared,
                finite=report.finite and finite,
            )
        terms = self._terms.of_sums(step, report.losses, self._wait)
        self._reported = gradient, report, terms
        if self._judges:
            return _Judged(self._judge(step, [report]), report.loss, terms, report.after)
        if self._place.rank == 0:
            self._notices.tell(
                _JUDGE,
                REPORTED,
                step,
                squared_norm=report.squared_norm,
                finite=report.finite,
                loss=report.loss,
                stop=report.stop,
            )
            if self._place.stage == 0:
                self._judge_for_all(step, report.after)
            elif self._place.width > 1:
                self._tell_workers(self._wait_for_verdict(step))
        notice = self._wait_for_verdict(step)
        verdict = Verdict(_FROM_WIRE[notice.outcome], notice.scale)
        return _Judged(verdict, report.loss, terms, AfterStep(notice.after))

    def _judge(self, step: int, reports: Iterable[Report]) -> Verdict:
        scales = self._scales
        return judge(reports, self._clip, scales.of(step), scaled=scales.scaled)

    def _judge_for_all(self, step: int, after: AfterStep) -> None:
        """At the judge: hear all stages, and tell their leaders and its own stage's workers."""
        board, stages = self._notices.board, len(self._place.widths)
        self._wait_for_others(lambda: board.count(REPORTED, step) == stages)
        reports = [
            Report(told.squared_norm, told.finite, told.loss, stop=told.stop)
            for _, told in sorted(board.of(REPORTED, step).items())
        ]
        verdict = self._judge(step, reports)
        outcome = _ON_WIRE[verdict.outcome]
        notice = Notice(outcome=outcome, scale=verdict.scale, step=step, after=after)
        self._tell_workers(notice)  # who begin the next step
        self._tell(_JUDGE, notice)
        for stage in range(1, stages):
            self._tell((stage, 0), notice)

    def _tell_workers(self, notice: Notice) -> None:
        for rank in range(1, self._place.width):
            self._tell((self._place.stage, rank), notice)

    def _tell(self, to: Address, notice: Notice) -> None:
        facts = {"outcome": notice.outcome, "scale": notice.scale, "after": notice.after}
        self._notices.tell(to, JUDGED, notice.step, **facts)

    def _wait_for_verdict(self, step: int) -> Notice:
        board = self._notices.board
        self._wait_for_others(lambda: board.has(JUDGED, step))
        (notice,) = board.of(JUDGED, step).values()
        return notice

    def _wait_for_others(self, condition: Callable[[], bool]) -> None:
        """Wait for what they may not tell any more.

        Raises:
            _DroppedError: training is over.
        """
        self._wait(lambda: self._over or condition())
        if not condition():
            raise _DroppedError

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait for what others tell, unless something failed here."""

        def told() -> bool:
            if self._thread is None:
                self.check()
            return condition()

        self._inbox.wait(told)
