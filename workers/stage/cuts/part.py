"""Cuts of a running job: each worker's part in them.

A cut follows a step that the judge has chosen, after the same step on all workers. Each stage's
leader then commits no more rows, copies what its layers are to host memory and goes on training,
while a thread writes it; commits wait no longer than until the judge has all shards hold
(`workers/stage/cuts/judge.py`). A cut that fails costs nothing but itself.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from protos.reason_pb2 import DISK_FULL, REASON_UNSPECIFIED
from protos.scheduler_pb2 import END_DISK_FULL
from protos.stage_pb2 import FREED, HELD, WRITTEN
from workers.links.inbox import Inbox, Stopped
from workers.links.notices import Notices
from workers.links.pipeline import Place
from workers.model.objective.curve import LossCurve
from workers.model.saved.cut import DenseFiles, PartFile, files_as_json
from workers.stage.cuts.judge import CutJudge, Moment
from workers.stage.cuts.state import StageState
from workers.stage.report.failure import end_reason_of
from workers.stage.rows.commits import RowCommits
from workers.stage.steps.verdict import AfterStep

_JUDGE = (0, 0)
_log = logging.getLogger("heterps.stage")


class Cuts:
    """What one worker does for the cuts of its job.

    Args:
        cuts: where they lie now; a folder or URL.
        layers: names of all layers of the model.
        capture: the state of the stage after so many steps; None at workers that write none.
        judge: at the leader of the first stage.
    """

    def __init__(
        self,
        place: Place,
        cuts: Callable[[], str],
        layers: list[str],
        capture: Callable[[int], StageState | None],
        commits: RowCommits,
        notices: Notices,
        inbox: Inbox,
        judge: CutJudge | None,
    ) -> None:
        self._place = place
        self._cuts = cuts
        self._layers = layers
        self._capture = capture
        self._commits = commits
        self._notices = notices
        self._inbox = inbox
        self.judge = judge
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="cut")
        self._written: Future[None] | None = None

    def due(self, step: int) -> AfterStep:
        """At the judge, once for each step: what is to follow it."""
        return self.judge.due(step + 1) if self.judge is not None else AfterStep.NOTHING

    def take(self, moment: Moment, metrics: Mapping[str, float]) -> None:
        """Take a cut, on the thread that trains; all workers do.

        Args:
            moment: how far the training is.
            metrics: of held-out data, at the last stage's leader where they were measured.
        """
        step, began = moment.step, time.monotonic()
        self._notices.board.forget_cuts(step)
        self._commits.hold(lambda: self._hold(step))
        if self.judge is not None:
            self.judge.begin(moment)
        failed = ""
        state: StageState | None = None
        try:
            state = self._capture(step)
        except RuntimeError as error:
            failed = f"stage {self._place.stage}: {error}"
        if self.judge is not None:
            self.judge.stalled(time.monotonic() - began)
        if self._place.rank == 0:
            curve = moment.curve if self._place.stage == len(self._place.widths) - 1 else None
            self._written = self._writing.submit(self._write, step, state, curve, metrics, failed)

    def finish(self) -> None:
        """Wait until the last one that was taken is written, or given up."""
        if self._written is not None:
            self._written.result()
        if self.judge is not None:
            self.judge.finish()

    def close(self) -> None:
        """Stop the threads."""
        self._writing.shutdown(wait=False, cancel_futures=True)
        if self.judge is not None:
            self.judge.close()

    def _hold(self, step: int) -> None:
        """Between two commits."""
        self._notices.tell(_JUDGE, HELD, step)
        self._inbox.wait(lambda: self._notices.board.has(FREED, step))

    def _write(
        self,
        step: int,
        state: StageState | None,
        curve: LossCurve | None,
        metrics: Mapping[str, float],
        failed: str,
    ) -> None:
        facts: dict[str, object] = {"failed": failed}
        try:
            if not failed and state is not None:
                facts |= self._files(state, curve, metrics)
        except Exception as error:
            text = f"stage {self._place.stage}: {type(error).__name__}: {error}"
            full = end_reason_of(error) == END_DISK_FULL
            facts = {"failed": text, "reason": DISK_FULL if full else REASON_UNSPECIFIED}
        try:
            self._notices.tell(_JUDGE, WRITTEN, step, facts=json.dumps(facts))
        except Stopped:
            raise
        except Exception as error:  # found by the training, too
            _log.warning("cut %d: %s", step, error)

    def _files(
        self, state: StageState, curve: LossCurve | None, metrics: Mapping[str, float]
    ) -> dict[str, object]:
        dense = DenseFiles(self._cuts())
        layers = {}
        for layer, kinds in state.by_layer(self._layers).items():
            files: dict[str, PartFile] = {}
            for kind, tensors in kinds.items():
                files[kind] = dense.write(tensors)
            layers[layer] = files_as_json(files)
        facts: dict[str, object] = {"layers": layers, "metrics": dict(metrics)}
        if curve is not None:
            facts["losses"] = files_as_json({"": dense.write_losses(curve)})[""]
        return facts | {"bytes": dense.bytes}
