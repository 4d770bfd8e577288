"""What a micro-batch takes to another stage and back, and what a byte of it takes of processor.

Steps of one micro-batch by a model of two layers that sleep, in one stage and in two. In both each
layer waits for the one before, so that what two stages take longer is all on the way:
processes that wake up, what a worker does around its layers after a pause, and what stages tell one
another at the end of a step. It says nothing of the job. The processor time that two stages take
more is what their workers are busy with for each other. Micro-batches of one number a sample tell
what that is whatever their size, large ones what their bytes add.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from protos.job_pb2 import JobSpec
from ps import ParameterClient
from workers.data import Batch
from workers.data.columns.labels import LABEL, ONE
from workers.device.copies import OnHost
from workers.learning.precision import Precision
from workers.links.all_reduce import StageGroup
from workers.links.inbox import Inbox
from workers.links.notices import Notices
from workers.links.outbox import Outbox
from workers.links.pipeline import Links, Place
from workers.links.service import StageService
from workers.links.session import Session
from workers.links.transport import Neighbours
from workers.model.chain.trace import TracedModel
from workers.model.module.randomness import Randomness
from workers.model.module.statistics import RunningStatistics
from workers.stage.cuts.beginning import Beginning
from workers.stage.cuts.judge import CutFacts
from workers.stage.parts import Parts, assemble
from workers.stage.rows.source import TrainingSource
from workers.stage.running.layers import StageLayers
from workers.stage.steps.schedule import Schedule

_STEPS, _WARM = 40, 8
_FEW, _WARM_FEW = 16, 4  # of large micro-batches
_PAUSE_S = 0.003  # of a layer's forward, after which caches are as cold as in a training
_SMALL, _LARGE = (8, 1), (1024, 2048)  # samples, and numbers that cross for each
_QUANTILE = 0.25  # of steps: a busy machine makes many of them longer, and none shorter
_TABLES = "crossing/"  # of which there are none
_LOOPBACK, _HERE = "127.0.0.1", torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Crossing:
    """Of a micro-batch between two stages.

    Args:
        seconds: there and back, what keeps workers busy among them.
        handling_s: of processor, in the worker of either stage, whatever the size.
        byte_s: the same of each byte besides, there or back.
    """

    seconds: float
    handling_s: float
    byte_s: float


class _Pause(nn.Module):
    """Sleeps, and notes when its forwards began, and what this process had used by then."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.began: list[float] = []
        self.used: list[float] = []

    def forward(self, input: Tensor) -> Tensor:
        self.began.append(time.perf_counter())
        self.used.append(time.process_time())
        time.sleep(_PAUSE_S)
        return input + self.shift


class _Model(nn.Module):
    """What crosses between its layers has `width` numbers a sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.first, self.last = _Pause(), _Pause()

    def forward(self, dense: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(dense.expand(-1, self.width)))[:, 0]
        return result


@dataclass(frozen=True, slots=True)
class _Ones:
    """The same batch for all steps."""

    samples: int

    def read(self, step: int, first: int, last: int) -> Batch:
        ones = np.ones((last - first, 1), np.float32)
        return Batch({"dense": ones, LABEL + ONE: ones[:, 0]})

    def labels(self, step: int) -> Batch:
        return self.read(step, 0, self.samples).labels


def time_crossing(shards: Sequence[str]) -> Crossing:
    """What a micro-batch takes to another stage of this host and back.

    Args:
        shards: addresses, of which nothing but an answer is asked.
    """
    one_s, used_s = _step_s(shards, 1, *_SMALL)
    two_s, used_by_two_s = _step_s(shards, 2, *_SMALL)
    handling_s = max(0.0, used_by_two_s - used_s) / 2
    (_, alone_s), (_, together_s) = (_step_s(shards, stages, *_LARGE) for stages in (1, 2))
    samples, width = _LARGE
    there_and_back = 2 * 4 * samples * width
    byte_s = max(0.0, (together_s - alone_s) / 2 - handling_s) / there_and_back
    return Crossing(max(0.0, two_s - one_s), handling_s, byte_s)


def _step_s(shards: Sequence[str], stages: int, samples: int, width: int) -> tuple[float, float]:
    """Seconds of a step in so many stages, and those of processor."""
    steps, warm = (_STEPS, _WARM) if width == 1 else (_FEW, _WARM_FEW)
    job = JobSpec(name="crossing")
    job.train.loss = "mse"
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 0.1
    job.train.batch_size, job.train.micro_batches = samples, 1
    stop, model = threading.Event(), _Model(width)
    with ExitStack() as stack:
        client = stack.enter_context(ParameterClient(list(shards)))
        stack.callback(stop.set)
        services = []
        for _ in range(stages):
            services.append(StageService(Session(Inbox(stop))))
            services[-1].serve(f"{_LOOPBACK}:0")
            stack.callback(services[-1].stop, 0.0)
        traced = TracedModel(model)
        schedule = Schedule(steps, lambda step: samples, 1)
        workers = [
            _worker(job, traced, services, stage, client, schedule) for stage in range(stages)
        ]
        first = workers[0]
        source = TrainingSource(
            _Ones(samples),
            first.executor.own,
            range(steps),
            0,
            first.rows,
            first.executor.upload,
            first.links.inbox,
            first.executor.loss,
        )
        for parts in workers:
            stack.callback(parts.close)
        pool = stack.enter_context(ThreadPoolExecutor(stages))
        trained = [
            pool.submit(_train, stop, parts, source if parts is first else None)
            for parts in workers
        ]
        for one in trained:
            one.result()
    taken = [
        [end - begin for begin, end in pairwise(times[-steps + warm :])]
        for times in (model.first.began, model.first.used)
    ]
    wall_s, used_s = np.quantile(taken, _QUANTILE, axis=1).tolist()
    return wall_s, used_s


def _train(stop: threading.Event, parts: Parts, source: TrainingSource | None) -> None:
    """Run one worker; where it fails the others end, too."""
    try:
        parts.executor.train(source)
    except BaseException:
        stop.set()
        raise


def _worker(
    job: JobSpec,
    traced: TracedModel,
    services: Sequence[StageService],
    stage: int,
    client: ParameterClient,
    schedule: Schedule,
) -> Parts:
    """The worker of a stage, one of as many as services; the last one has the layers left."""
    stages, staging, session = len(services), OnHost(), services[stage].session
    addresses = [[service.address] for service in services]
    place = Place(stage, 0, (1,) * stages)
    graph = traced.stage(stage, stage if stage + 1 < stages else 1)

    def outbox(other: int) -> Outbox | None:
        if not 0 <= other < stages:
            return None
        return Outbox(Neighbours(addresses[other], f"stage {other}", 0, _LOOPBACK), staging)

    return assemble(
        job,
        place,
        StageLayers(
            graph,
            StageGroup(_HERE),
            _HERE,
            staging,
            Precision.of("", _HERE),
            Randomness(graph.module, 0, fixed=True),
            RunningStatistics(graph.module, 1),
        ),
        Links(session.inbox, outbox(stage - 1), outbox(stage + 1)),
        Notices((stage, 0), addresses, session.board),
        client,
        schedule,
        0,
        _TABLES,
        Beginning(),
        CutFacts("crossing", job, stages, ["first", "last"], 0, 1, _TABLES, 0),
        None,
    )
