"""One worker of one pipeline stage: forward, backward, the ends of steps; then evaluate.

Which micro-batches a worker computes follows from a counter that runs on over steps
(`workers/stage/steps/schedule.py`). A worker prefers a new forward until so many micro-batches are
on their way that all stages have something to do, and from then on a gradient that has arrived
(1F1B, [PipeDream](https://arxiv.org/abs/1806.03377)). It takes both in the order of their
micro-batches, which fixes every sum. Each micro-batch's loss is weighted by its share of the step,
so that the summed gradient is that of the whole batch however it was spread.

With a staleness of S the forwards of step t may begin once the updates of the steps before t-S are
applied, so that the steps after one that is not over fill the pipeline. They compute on weights of
their own (`workers/stage/update/versions.py`). With S = 0 a step begins when the one before it is
over.

A worker of stage s has at most 2⌈(k_s + k_(s+1) + … + k_n) / k_s⌉ micro-batches between forward and
backward, k being the stages' widths: where stages are equally fast in all, half of them are on
their way through the stages and back, and as many wait where workers meet out of turn. So many
activations take memory, as planned (`protos/in_flight.py`); the last stage holds those of one.

Workers that share out experts compute in lockstep: in a step all forwards come first, and may all
be in flight, steps follow one another (S = 0), and in evaluation a worker without a batch computes
one for the others' sake.

So has every worker where the loss is one of whole batches (`workers/stage/update/whole_loss.py`),
as the last stage returns no micro-batch before it has had all; there steps may overlap.

Nothing here waits for a GPU within a step: inputs are on their way before they are needed
(`workers/stage/rows/micro_batch.py`), what leaves is copied and sent behind, and a step's end has a
thread of its own (`workers/stage/update/ending.py`).
"""

import time
from collections import deque
from collections.abc import Callable

import torch

from chassis.tracing import span
from protos.in_flight import filling, most_in_flight
from protos.job_pb2 import JobSpec
from protos.stage_pb2 import Notice
from workers.data.held_out import HeldOut
from workers.data.reader import Split
from workers.errors import DivergedError
from workers.links.pipeline import Links, Place
from workers.model.objective.curve import LossCurve
from workers.model.objective.loss import job_loss
from workers.model.objective.metrics import JobMetrics
from workers.stage.cuts.beginning import Beginning
from workers.stage.cuts.part import Cuts
from workers.stage.report.busy import BusyClock
from workers.stage.report.progress import PAUSED, TRAIN, Progress
from workers.stage.rows.ahead import StageRows
from workers.stage.rows.source import TrainingSource
from workers.stage.running.callbacks import Callbacks
from workers.stage.running.evaluation import Evaluation, Measured
from workers.stage.running.following import Following
from workers.stage.running.layers import StageLayers
from workers.stage.running.open_step import InFlight, OpenStep
from workers.stage.running.passes import Passes
from workers.stage.steps.schedule import MicroBatchSpec, Schedule
from workers.stage.steps.verdict import AfterStep
from workers.stage.update.ending import Ending
from workers.stage.update.versions import Versions
from workers.stage.update.whole_loss import WholeLoss

_DRAIN = "drain"
_SOON_S = 0.05  # for a verdict to arrive


class StageExecutor:
    """Runs one worker's part of a job.

    Args:
        layers: of the stage.
        rows: of their embeddings.
        place: which worker this is.
        links: to the neighbouring stages.
        versions: of the stage's weights.
        ending: of its steps.
        staleness: updates that a step lacks.
        beginning: of the training.
        progress: to be kept.
        cuts: where any are taken.
        metrics: that are measured of held-out data.
        following: what follows steps.
        callbacks: at the worker that calls them.
        held_out: what is measured.
        lockstep: whether the workers of the stage share out experts.
    """

    def __init__(
        self,
        job: JobSpec,
        layers: StageLayers,
        rows: StageRows,
        place: Place,
        links: Links,
        schedule: Schedule,
        versions: Versions,
        ending: Ending,
        staleness: int,
        beginning: Beginning,
        progress: Progress,
        cuts: Cuts | None,
        metrics: JobMetrics,
        following: Following,
        callbacks: Callbacks | None,
        held_out: HeldOut,
        *,
        lockstep: bool = False,
    ) -> None:
        self.progress = progress
        curve = beginning.curve if place.in_last_stage else LossCurve()  # others hear of none
        self.progress.resume(beginning.step, beginning.samples, curve, beginning.train_seconds)
        self._cuts = cuts
        self._held_out = held_out
        self._layers = layers
        self._rows = rows
        self._place = place
        self._links = links
        self._inbox = links.inbox
        self._schedule = schedule
        self._versions = versions
        self._ending = ending
        self._staleness = staleness
        self._lockstep = lockstep
        self.loss = job_loss(job)
        self._depth = most_in_flight(
            place.widths,
            place.stage,
            schedule.micro_batches,
            staleness,
            whole_batch=self.loss.whole,
            lockstep=schedule.lockstep,
        )
        self._filling = 0 if self.loss.whole else filling(place.widths, place.stage)
        self._whole = (
            WholeLoss(self.loss, layers.group, schedule, job.train.seed, beginning.step)
            if self.loss.whole and links.after is None
            else None
        )
        self._given_up = False  # by another worker of the stage: a verdict will end the training
        self._on_pause: Callable[[], None] = lambda: None
        self._opened = beginning.step  # steps begun
        self._open: deque[OpenStep] = deque()  # with micro-batches to come
        self._in_flight: deque[InFlight] = deque()  # in the order of their forwards
        self._busy = BusyClock(layers.device)
        self._metrics = metrics
        self.following = following
        self._callbacks = callbacks
        self.committed = False  # whether training is over, and all of it in the tables
        self._passes = Passes(
            *(layers, rows, links, versions, self.loss, self._whole, self._busy),
            scale=ending.loss_scale,
            before_backward=self._watch_last,
        )
        self.upload = self._passes.upload

    def train(
        self, source: TrainingSource | None, on_pause: Callable[[], None] = lambda: None
    ) -> None:
        """Run the steps; on return every gradient of this worker that counts has been applied.

        All of them, unless a validation or a callback says that this is enough.

        Args:
            on_pause: called where all are to wait after a step, until the inbox is closed.

        Raises:
            Stopped: it was.
            DivergedError: a loss or gradient is not finite. What was applied until then stays.
        """
        self._layers.graph.module.train()
        self._passes.source, self._on_pause = source, on_pause
        self.progress.phase = TRAIN
        self.progress.began = time.perf_counter()
        try:
            if self._callbacks is not None:
                self._callbacks.begin()
            while not self._is_over:
                action = self._next()
                with self._busy.handling():
                    action()
            if self.following.stopped:
                if self._whole is not None:
                    self._whole.give_up(self._opened)
                self._ending.abandon(self._opened)
                self._go_back()
            self._ending.flush()
            if self._cuts is not None:
                self._cuts.finish()
            if self._place.rank == 0:
                self._rows.evict()
        except DivergedError:
            end = self._none_begun
            if self._whole is not None:
                self._whole.give_up(end)
            self._ending.abandon(end)
            self._go_back()
            raise
        finally:
            self.progress.busy_s = self._busy.seconds()
            self.progress.ended = time.perf_counter()
        self._layers.group.barrier()  # the leader's commits are others', too
        self.committed = True

    def evaluate(self, split: Split, phase: str = "") -> Measured:
        """Predict a held-out split.

        Args:
            phase: names this pass where there are several of a split.
        """
        self.progress.phase = split
        evaluation = Evaluation(
            *(self._held_out, self._layers, self._rows, self._place, self._links, self._metrics),
            lockstep=self._lockstep,
        )
        return evaluation.run(split, phase or split)

    def drain(self) -> None:
        """Wait until every worker of the stages before has ended, its writes done.

        Once the last stage returns from here, all tables and weights are final.
        """
        self._inbox.wait(lambda: self._inbox.ended(_DRAIN, self._place.width_before))
        self._end(_DRAIN)

    def own(self, step: int) -> tuple[MicroBatchSpec, ...]:
        """The micro-batches of a step that this worker computes."""
        return self._schedule.own(step, self._place.rank, self._place.width)

    def _end(self, phase: str) -> None:
        """Say that nothing more of a phase comes, once all workers of the stage are here."""
        self._layers.group.barrier()
        if self._links.after is not None:
            self._links.after.end(phase)

    def _go_back(self) -> None:
        """Have the layers be as after the last update, whatever forwards have begun since."""
        self._versions.use_newest(self.progress.step)
        self._layers.statistics.go_back(self.progress.step)

    @property
    def _is_over(self) -> bool:
        following = self.following
        return following.stopped or (
            self.progress.step == self._schedule.steps and not following.pending
        )

    def _next(self) -> Callable[[], None]:
        """Wait until there is something to do; what is to be done first."""
        found: list[Callable[[], None]] = []

        def look() -> bool:
            action = self._possible()
            if action is not None:
                found.append(action)
            return bool(found)

        self._ending.settle()
        self._inbox.wait(look)
        return found[0]

    def _possible(self) -> Callable[[], None] | None:
        self._ending.check()
        self._open_steps()
        if self.following.pending:
            if not self._open and self._opened == self._may_open:
                return self._follow
        elif self._ending.ready:
            return self._update
        if self._given_up:
            return None
        oldest = self._open[0] if self._open else None
        if oldest is not None and oldest.awaits_loss and not oldest.to_forward:
            return self._compute_loss
        if oldest is not None and oldest.backward == len(oldest.own):
            return self._close
        forward = self._forward_possible()
        if self._in_flight and self._backward_possible(self._in_flight[0]):
            fills = forward and len(self._in_flight) < self._filling
            return self._forward if fills else self._backward
        if forward:
            at_once = self._links.after is None and self._whole is None
            return self._forward_backward if at_once else self._forward
        return None

    @property
    def _none_begun(self) -> int:
        """The first step that no worker can have begun, as none has applied the next one here."""
        return min(self.progress.step + self._staleness + 1, self._schedule.steps)

    @property
    def _may_open(self) -> int:
        """Steps that may be begun, as far as weights are there; none beyond what is to follow."""
        ahead = self._staleness + (0 if self.following.pending else 1)
        return min(self._schedule.steps, self.progress.step + ahead)

    def _open_steps(self) -> None:
        """Open steps up to the first whose forwards are not done."""
        while self._opened < self._may_open and not (self._open and self._open[-1].to_forward):
            zero = torch.zeros((), dtype=torch.float64, device=self._layers.device)
            own, whole = self.own(self._opened), self._whole is not None
            self._open.append(OpenStep(self._opened, own, zero, whole))
            self._opened += 1

    def _backward_possible(self, flight: InFlight) -> bool:
        if self._lockstep and flight.step.to_forward:
            return False  # the same order on all workers, whatever arrives first
        if self._whole is not None:
            return not flight.step.awaits_loss
        return self._passes.has_gradient(flight)

    def _forward_possible(self) -> bool:
        if not self._open or not self._open[-1].to_forward or len(self._in_flight) >= self._depth:
            return False
        return self._passes.has_input(self._open[-1])

    def _forward(self) -> None:
        self._in_flight.append(self._passes.forward(self._open[-1]))

    def _backward(self) -> None:
        self._passes.backward(self._in_flight.popleft())

    def _forward_backward(self) -> None:
        self._passes.both(self._open[-1])

    def _compute_loss(self) -> None:
        """That of the whole batch, once the forwards of a step are done."""
        assert self._whole is not None
        step = self._open[0]
        with self._busy.waiting():
            self._given_up = not self._whole.gather(step.number)
        if self._given_up:
            return
        with self._busy.running():
            step.add(self._whole.compute(step.number, self._ending.loss_scale(step.number)))
        step.awaits_loss = False

    def _watch_last(self, step: OpenStep) -> None:
        """Before a backward: in the last one of a step its sums begin.

        Not in lockstep, where experts' collectives and those of sums are to have one order.
        """
        if step.backward == len(step.own) - 1 and not self._lockstep:
            self._ending.watch(step.number)

    def _close(self) -> None:
        """All that this worker has to give to the oldest open step is there."""
        step = self._open.popleft()
        with self._busy.running():
            self._ending.begin(step.number, step.loss, step.terms, step.rows)

    def catch_up(self) -> None:
        """Apply the steps whose verdict is here or on its way, at a worker that gives up."""
        self._ending.give_up()
        until = time.monotonic() + _SOON_S
        while time.monotonic() < until:
            if self._ending.ready and not (self.following.pending or self.following.stopped):
                self._apply()
            time.sleep(_SOON_S / 20)

    def decide(self, notice: Notice) -> None:
        """Apply the step in doubt by the verdict of others, at a worker that has given up."""
        self._ending.hear(notice)
        self._apply()

    def _update(self) -> None:
        """Apply the step whose verdict is here, and do what follows it."""
        after = self._apply()
        if self._callbacks is not None and not self.following.stopped:
            self._callbacks.stepped()
        if after and not self.following.pending:
            self.following.carry_out(after, self._validate, self._pause)

    def _follow(self) -> None:
        """Do what follows the steps so far, as nothing else is under way any more."""
        with self._busy.waiting(), self.progress.apart():
            self.following.carry_out(self.following.pending, self._validate, self._pause)

    def _validate(self, phase: str) -> Measured:
        return self.evaluate("valid", phase)

    def _pause(self) -> None:
        """Wait until the inbox is closed, once the cut is complete."""
        if self._whole is not None:  # others may have begun the steps after it
            end = self.progress.step + self._staleness
            self._whole.give_up(min(end, self._schedule.steps))
        assert self._cuts is not None
        self._cuts.finish()
        self.progress.phase = PAUSED
        self._on_pause()
        self._inbox.wait(lambda: False)

    def _apply(self) -> AfterStep:
        """Apply the step whose verdict is here; what follows it."""
        number = self.progress.step
        with span("update", step=number, rank=self._place.rank), self._busy.running():
            ended = self._ending.apply()
        if ended is None:
            self.following.stopped, self._opened = True, self._none_begun
            return AfterStep.NOTHING
        if self._links.after is None:
            self.progress.curve.add(ended.loss, ended.terms)
        self.progress.step = number + 1
        self.progress.samples += self._schedule.samples(number)
        self.progress.busy_s = self._busy.seconds()
        self.following.ended(ended.after)
        return ended.after
