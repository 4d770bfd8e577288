"""What a step takes besides its layers: some real ones, of one worker for each stage."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from protos.decision_pb2 import PlanStage
from protos.job_pb2 import JobSpec
from protos.node_pb2 import LaunchRequest
from protos.stage_pb2 import StageWorkers, Topology
from workers.data import GlobalBatches
from workers.links.inbox import Inbox
from workers.links.service import StageService
from workers.links.session import Session
from workers.profiling.clock import QuietClock
from workers.stage.executor import StageExecutor
from workers.stage.parts import Share, build
from workers.stage.source import TrainingSource

MEASURED_S = 1.5
_LEAST, _MOST = 8, 60  # steps
_WARM = 3  # of them, in which what is needed is allocated
_NAP_S = 0.0005
_LOOPBACK = "127.0.0.1"


def time_step(
    job: JobSpec,
    layers: Sequence[str],
    shards: list[str],
    batches: GlobalBatches,
    micro_batches: int,
    expected_s: float,
    device: str,
    cuts: Sequence[int] = (),
    attempt: int = 0,
    seconds: float = MEASURED_S,
) -> float:
    """Seconds of a step, the median of some; 0 where the training has too few of them.

    Args:
        layers: names of the model's.
        shards: addresses, where tables of the job may be made.
        micro_batches: of a step.
        expected_s: about how long one takes.
        device: cpu or cuda.
        cuts: the last layer of each stage but the last one; every stage has a worker of its own,
            on a thread.
        attempt: tells its commits from those of others on the same shards.
        seconds: that it may take, about.
    """
    steps = _WARM + min(max(int(seconds / expected_s), _LEAST), _MOST)
    steps = min(steps, batches.steps)
    if steps < _WARM + 2:
        return 0.0
    stop = threading.Event()
    with ExitStack() as stack:
        stack.callback(stop.set)
        lasts = [*cuts, len(layers) - 1]
        firsts = [0, *(cut + 1 for cut in cuts)]
        launch = LaunchRequest(
            job_id="profile",
            job=job,
            attempt=attempt,
            stages=[
                PlanStage(first=f, last=n, units=1) for f, n in zip(firsts, lasts, strict=True)
            ],
            layers=layers,
            devices=[device] * len(lasts),
            micro_batches=micro_batches,
            staleness=job.train.staleness,
        )
        launch.job.train.max_steps = steps
        launch.job.train.warm_start = ""
        services = []
        for _ in lasts:
            services.append(StageService(Session(Inbox(stop))))
            services[-1].serve(f"{_LOOPBACK}:0")
            stack.callback(services[-1].stop, 0.0)
        stages = [StageWorkers(addresses=[service.address]) for service in services]
        topology = Topology(job_id=launch.job_id, shards=shards, stages=stages)
        workers = []
        for index, service in enumerate(services):
            own = LaunchRequest(index=index)
            own.MergeFrom(launch)
            share = replace(Share.of(own), batches=batches)
            workers.append(build(share, topology, service.session, None, None))
            stack.callback(workers[-1].close)
        first, inbox = workers[0], services[0].session.inbox
        source = TrainingSource(
            batches,
            first.executor.own,
            range(steps),
            job.train.staleness,
            first.rows,
            first.executor.upload,
            inbox,
            first.executor.loss,
        )
        others = stack.enter_context(ThreadPoolExecutor(len(workers)))
        trained = [others.submit(_train, stop, one.executor) for one in workers[1:]]
        ends = _ends(first.executor, lambda: _train(stop, first.executor, source))
        for one in trained:
            one.result()
    return float(np.median(np.diff(ends[_WARM:]))) if len(ends) > _WARM + 1 else 0.0


def _train(
    stop: threading.Event, executor: StageExecutor, source: TrainingSource | None = None
) -> None:
    """Run one worker's part; where it fails the others end, too."""
    try:
        executor.train(source)
    except BaseException:
        stop.set()
        raise


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
