"""What a step takes besides its layers: some real ones, of one worker that has the whole model.

What passes from a step's gradient to rows that have it is measured there, too: the commit of one
step, and the pull of a later one that waits for it, with all that tells of them.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from protos.decision_pb2 import PlanStage
from protos.job_pb2 import JobSpec
from protos.node_pb2 import LaunchRequest
from protos.stage_pb2 import StageWorkers, Topology
from workers.data import GlobalBatches
from workers.errors import DivergedError
from workers.links.inbox import Inbox
from workers.links.session import Session
from workers.profiling.clock import QuietClock
from workers.stage.connect import build
from workers.stage.rows.source import TrainingSource
from workers.stage.running.executor import StageExecutor
from workers.stage.share import Share

MEASURED_S = 1.5
_LEAST, _MOST = 8, 60  # steps
_WARM = 3  # of them, in which what is needed is allocated
_NAP_S = 0.0005
_QUANTILE = 0.25  # of delays: a busy machine makes many of them longer, and none shorter


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What real steps took.

    Args:
        seconds: of a step, the median of some.
        rows_s: from when its gradient is there to when rows are that have it; 0 without rows.
    """

    seconds: float = 0.0
    rows_s: float = 0.0


def time_step(
    job: JobSpec,
    layers: Sequence[str],
    shards: list[str],
    batches: GlobalBatches,
    micro_batches: int,
    expected_s: float,
    device: str,
    kind: str,
) -> StepTimes:
    """Times of a step; nothing where the training has too few of them, or diverges.

    Args:
        layers: names of the model's.
        shards: addresses, where tables of the job may be made.
        micro_batches: of a step.
        expected_s: about how long one takes.
        device: cpu or cuda.
        kind: name of this machine's resource type.
    """
    steps = _WARM + min(max(int(MEASURED_S / expected_s), _LEAST), _MOST)
    steps = min(steps, batches.steps)
    if steps < _WARM + 2:
        return StepTimes()
    launch = LaunchRequest(
        job_id="profile",
        job=job,
        stages=[PlanStage(first=0, last=len(layers) - 1, units=1, type=kind)],
        layers=layers,
        devices=[device],
        micro_batches=micro_batches,
        staleness=job.train.staleness,
    )
    launch.job.train.max_steps = steps
    launch.job.train.warm_start = ""
    # Nothing of a training is told of these steps, nor measured or kept in between.
    for field in ("loggers", "validate", "checkpoint"):
        launch.job.train.ClearField(field)
    launch.job.model.ClearField("callbacks")
    share = replace(Share.of(launch), batches=batches)
    stop = threading.Event()
    inbox = Inbox(stop)
    alone = StageWorkers(addresses=["127.0.0.1:0"])  # which nobody calls
    topology = Topology(job_id=launch.job_id, shards=shards, stages=[alone])
    parts = build(share, topology, Session(inbox), None, None)
    try:
        source = TrainingSource(
            batches,
            parts.executor.own,
            range(steps),
            share.staleness,
            parts.rows,
            parts.executor.upload,
            inbox,
            parts.executor.loss,
        )
        ends = _ends(parts.executor, lambda: parts.executor.train(source))
    except DivergedError:
        return StepTimes()  # the training is to say so
    finally:
        stop.set()
        inbox.close()
        parts.close()
    if len(ends) <= _WARM + 1:
        return StepTimes()
    delays = [*parts.rows.order.delays][_WARM:]
    rows_s = float(np.quantile(delays, _QUANTILE)) if delays else 0.0
    return StepTimes(float(np.median(np.diff(ends[_WARM:]))), rows_s)


def _ends(executor: StageExecutor, train: Callable[[], None]) -> list[float]:
    """When each step ended, by the clock of this thread, which trains."""
    ends: list[float] = []
    over = threading.Event()
    clock = QuietClock()

    def watch() -> None:
        while not over.is_set():
            if executor.progress.step > len(ends):
                ends.extend([clock.now()] * (executor.progress.step - len(ends)))
            time.sleep(_NAP_S)

    watcher = threading.Thread(target=watch, name="steps", daemon=True)
    watcher.start()
    try:
        train()
    finally:
        over.set()
        watcher.join()
    return ends
