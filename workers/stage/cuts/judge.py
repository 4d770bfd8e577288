"""What the judge, the leader of the first stage, does for cuts: when, of which rows, which stay.

It says when held-out data is measured, too.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from chassis.interval import Interval
from protos.job_pb2 import JobSpec
from protos.reason_pb2 import DISK_FULL, REASON_UNSPECIFIED
from protos.scheduler_pb2 import Cut as CutReport
from protos.scheduler_pb2 import CutList
from protos.stage_pb2 import FREED, HELD, WRITTEN
from ps import ParameterClient
from ps.checkpoint.bounds import parse_json
from ps.checkpoint.manifest import read_manifest
from ps.checkpoint.places import open_store
from ps.checkpoint.tables import chain, save_of
from ps.errors import CheckpointError
from workers.errors import BestLostError
from workers.links.inbox import Inbox, Stopped
from workers.links.notices import Notices
from workers.model.objective.curve import LossCurve
from workers.model.saved.cut import (
    Cut,
    LayerFiles,
    PartFile,
    ScaleState,
    TablesSave,
    Validated,
    files_of,
    part_file,
)
from workers.stage.cuts.folder import CutFolder, SupersededError
from workers.stage.cuts.validation import ValidationClock
from workers.stage.report.progress import Progress
from workers.stage.steps.verdict import AfterStep

_LONGEST_CHAIN = 16  # saves of tables that build on each other
_LONGEST_HELD_S = 10.0  # for which commits wait; then there is no cut
_LONGEST_WRITING_S = 60.0  # that a stage takes for its part of one that has failed
_log = logging.getLogger("heterps.stage")


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a training is.

    Attributes:
        step: how many steps are over.
        samples: of these.
        applied: those of them that were not skipped.
        scales: of the loss.
        curve: the losses of these steps, in the last stage.
        train_seconds: of all attempts.
        validated: what held-out data gave, of `train.validate`.
    """

    step: int
    samples: int
    applied: int
    scales: ScaleState | None
    curve: LossCurve
    train_seconds: float
    validated: Sequence[Validated] = ()


@dataclass(frozen=True, slots=True)
class CutFacts:
    """What all cuts of a run have in common.

    Attributes:
        layers: names of the model's, in its order.
        tables: what the names of the job's tables begin with.
        generation: of the job's workers.
        position: where the data of a step is read from, as of `GlobalBatches`.
        contents: of the job's splits, as of `Dataset`, a line each.
    """

    job_id: str
    job: JobSpec
    attempt: int
    layers: Sequence[str]
    staleness: int
    micro_batches: int
    tables: str
    generation: int = 0
    position: Callable[[int], str] = lambda step: ""
    contents: str = ""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A save of the tables."""

    folder: str
    bytes: int


@dataclass(frozen=True, slots=True)
class _Written:
    """What all stages have written."""

    layers: dict[str, dict[str, PartFile]]
    losses: PartFile
    metrics: dict[str, float]
    bytes: int


class CutJudge:
    """Decides on cuts and completes them, each behind the training; one at a time.

    Args:
        stages: how many there are.
        steps: of the training; after the last one the model is saved.
        progress: by which cuts are asked for and told.
    """

    def __init__(
        self,
        facts: CutFacts,
        folder: CutFolder,
        stages: int,
        client: ParameterClient,
        notices: Notices,
        inbox: Inbox,
        steps: int,
        progress: Progress,
    ) -> None:
        self._facts = facts
        self._folder = folder
        self._stages = stages
        self._client = client
        self._notices = notices
        self._inbox = inbox
        self._steps = steps
        self._progress = progress
        every = facts.job.train.checkpoint.every
        self._every = Interval.of(every) if every else Interval()
        self._clock = ValidationClock(facts.job.train.validate.every, steps)
        self._last = time.monotonic()
        self._under_way = 0  # the last cut that was decided on, until it is complete
        self._superseded = False
        self._stall_s = 0.0
        self._chain: list[_Saved] = []
        self._lock = threading.Lock()
        self._freed = 0  # the last cut whose commits wait no more
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self._completing: Future[None] | None = None
        self._failure: Exception | None = None  # of the last cut
        if every:
            self._thread.submit(self._open)

    def due(self, step: int) -> AfterStep:
        """Once for each step, before it ends: what is to follow it."""
        validate = AfterStep.VALIDATE if self._clock.due(step) else AfterStep.NOTHING
        return self._cut_due(step) | validate

    def validated(self) -> None:
        """Held-out data was measured."""
        self._clock.measured()

    def _cut_due(self, step: int) -> AfterStep:
        """Whether a cut with a step and those before is taken."""
        if self._under_way or self._superseded or step == self._steps:
            return AfterStep.NOTHING
        now, every, pause = time.monotonic(), self._every, self._progress.pause_asked.is_set()
        if not (
            pause
            or (every.steps and step % every.steps == 0)
            or (every.seconds and now - self._last >= every.seconds)
        ):
            return AfterStep.NOTHING
        self._under_way, self._last = step, now
        return AfterStep.PAUSE if pause else AfterStep.CUT

    def begin(self, moment: Moment) -> None:
        """Begin to complete the cut that was decided on: its last step is over."""
        self._stall_s, self._failure = 0.0, None
        self._under_way = max(self._under_way, moment.step)
        self._completing = self._thread.submit(self._complete, moment, time.monotonic())

    def stalled(self, seconds: float) -> None:
        """Training has waited."""
        self._stall_s += seconds

    def finish(self) -> None:
        """Wait until the last cut is complete, or given up."""
        if self._completing is not None:
            self._completing.result()

    def require(self, step: int) -> None:
        """Wait until the last cut is complete, which was taken after so many steps.

        Raises:
            BestLostError: it was given up.
            Stopped: told to end first.
        """
        self.finish()
        if isinstance(self._failure, Stopped):
            raise self._failure
        if self._failure is not None:
            raise BestLostError(
                f"train.validate: the state of step {step} is the best so far, and its checkpoint "
                f"could not be taken: {self._failure}"
            ) from self._failure

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _open(self) -> None:
        try:
            self._folder.open()
            self._tell()
        except SupersededError as error:
            self._superseded = True
            _log.warning("%s", error)
        except Exception as error:  # told again at each cut
            _log.warning("cuts: %s", error)

    def _complete(self, moment: Moment, began: float) -> None:
        step = moment.step
        try:
            self._folder.open()
            tables, size = self._save_tables(step)
            found = self._all_written(step)
            told = self._progress.cuts_told
            named = None if told is None else {one.step for one in told.cuts}
            self._folder.add(self._cut(moment, began, tables, size, found), named)
        except Stopped as error:
            self._failure = error
        except SupersededError as error:
            self._superseded, self._failure = True, error
            _log.warning("cut %d is given up: %s", step, error)
        except Exception as error:  # a cut that fails is left; training goes on
            self._chain, self._failure = [], error
            _log.warning("cut %d failed: %s: %s", step, type(error).__name__, error)
            self._tell(f"cut {step}: {type(error).__name__}: {error}")
            self._free(step)
            self._tidy(step)
        else:
            _log.info("cut %d in %.2f s", step, time.monotonic() - began)
            self._tell()
        finally:
            self._free(step)
            if self._under_way == step:
                self._under_way = 0

    def _tidy(self, step: int) -> None:
        """Remove what is left of a cut that failed, once all stages have written their parts."""
        board, until = self._notices.board, time.monotonic() + _LONGEST_WRITING_S
        try:
            self._inbox.wait(
                lambda: board.count(WRITTEN, step) == self._stages or time.monotonic() > until
            )
            self._folder.tidy()
        except Stopped:
            pass  # whoever goes on removes it
        except Exception as error:  # with the next cut
            _log.warning("cut %d: what is left of it stays: %s", step, error)

    def _cut(
        self, moment: Moment, began: float, tables: TablesSave, size: int, found: _Written
    ) -> Cut:
        facts = self._facts
        missing = [name for name in found.layers if name not in (*facts.layers, "")]
        if missing:
            raise CheckpointError(f"layer {missing[0]!r} is none of the model's")
        return Cut(
            job_id=facts.job_id,
            attempt=facts.attempt,
            step=moment.step,
            samples=moment.samples,
            applied=moment.applied,
            staleness=facts.staleness,
            micro_batches=facts.micro_batches,
            scales=moment.scales,
            job=facts.job,
            layers=tuple(
                LayerFiles(name, found.layers.get(name, {}))
                for name in (*facts.layers, *([""] if "" in found.layers else []))
            ),
            losses=found.losses,
            tables=tables,
            metrics=found.metrics,
            validated=moment.validated,
            train_seconds=moment.train_seconds,
            position=facts.position(moment.step),
            contents=facts.contents,
            taken_at=time.time(),
            size=found.bytes + size,
            seconds=time.monotonic() - began,
            stall_s=self._stall_s,
        )

    def _save_tables(self, step: int) -> tuple[TablesSave, int]:
        """Have the shards save what all stages have committed; the save, and its bytes.

        Commits go on as soon as the shards hold them back themselves.
        """
        board = self._notices.board
        self._inbox.wait(lambda: board.count(HELD, step) == self._stages)
        began = time.monotonic()
        whole, deltas = self._chain[:1], self._chain[1:]
        more = (
            whole
            and len(self._chain) < _LONGEST_CHAIN
            and sum(one.bytes for one in deltas) <= whole[0].bytes
        )
        # A generation before may be writing still what it saved at this very step.
        folder = f"{step}-{self._facts.attempt}.{self._facts.generation}"
        tables = f"{self._folder.place}/tables"

        def held() -> None:
            if not self._free(step):
                raise CheckpointError(f"the shards held no pushes within {_LONGEST_HELD_S:g} s")
            self._stall_s += time.monotonic() - began

        patience = threading.Timer(_LONGEST_HELD_S, self._free, (step,))
        patience.daemon = True
        patience.start()
        try:
            self._client.save(
                f"{tables}/{folder}",
                prefix=self._facts.tables,
                mode="delta" if more else "checkpoint",
                since=f"{tables}/{self._chain[-1].folder}" if more else None,
                held=held,
            )
        finally:
            patience.cancel()
        place = open_store(f"{tables}/{folder}")
        size = sum(file.bytes for file in read_manifest(place).files)
        self._chain = [*(self._chain if more else []), _Saved(folder, size)]
        return TablesSave(tuple(one.folder for one in self._chain), save_of(chain(place))), size

    def _free(self, step: int) -> bool:
        """Let all leaders commit again; False where they were told before."""
        with self._lock:
            if self._freed >= step:
                return False
            self._freed = step
        for stage in range(self._stages):
            self._notices.tell((stage, 0), FREED, step)
        return True

    def _all_written(self, step: int) -> _Written:
        board = self._notices.board
        self._inbox.wait(lambda: board.count(WRITTEN, step) == self._stages)
        layers: dict[str, dict[str, PartFile]] = {}
        metrics: dict[str, float] = {}
        losses, size = None, 0
        for (stage, _), notice in sorted(board.of(WRITTEN, step).items()):
            where = f"stage {stage}"
            facts = parse_json(notice.facts.encode(), where, "what a stage has written")
            facts.default("failed", "")
            facts.default("reason", REASON_UNSPECIFIED)
            reason = facts.count("reason")
            if failed := facts.text("failed"):
                error = CheckpointError(failed)
                error.reason = DISK_FULL if reason == DISK_FULL else REASON_UNSPECIFIED
                raise error
            for name, files in facts.mapping("layers").items():
                layers.setdefault(name, {}).update(files_of(files, where))
            metrics |= {
                name: float(value)
                for name, value in facts.mapping("metrics").items()
                if math.isfinite(value)
            }
            size += facts.count("bytes")
            facts.default("losses", None)
            told = facts.one("losses")
            losses = part_file(told) if told is not None else losses
        if losses is None:
            raise CheckpointError("the last stage has written no losses")
        return _Written(layers, losses, metrics, size)

    def _tell(self, failed: str = "") -> None:
        place = self._folder.place
        self._progress.cuts = CutList(
            cuts=[
                CutReport(
                    step=cut.step,
                    place=f"{place}/{cut.step}",
                    taken_at=cut.taken_at,
                    seconds=cut.seconds,
                    stall_s=cut.stall_s,
                    bytes=cut.size,
                    attempt=cut.attempt,
                    metrics=dict(cut.metrics),
                    samples=cut.samples,
                )
                for cut in self._folder.cuts
            ],
            failed=failed,
        )
