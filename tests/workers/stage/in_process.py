"""The workers of a pipeline as threads of one process, with inboxes and tables in memory."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from protos import codec, stage_pb2
from protos.job_pb2 import JobSpec
from ps import LocalTable
from workers.data.columns import Batch
from workers.device.copies import OnHost
from workers.learning.precision import Precision
from workers.links.all_reduce import StageGroup
from workers.links.frames import Frame
from workers.links.inbox import Inbox
from workers.links.outbox import Outbox
from workers.links.pipeline import Links, Place
from workers.links.ring_port import local_rings
from workers.model.trace import TracedModel
from workers.stage.executor import StageExecutor
from workers.stage.layers import StageLayers
from workers.stage.rows import StageRows
from workers.stage.schedule import Schedule
from workers.stage.source import TrainingSource
from workers.stage.staleness import StalenessBound
from workers.stage.update import Update

CPU = torch.device("cpu")
LIMIT_S = 120.0  # only a hang reaches it


class Tables:
    """A parameter client of tables in this process; says what was pulled and pushed, in order."""

    def __init__(self):
        self.tables = {}
        self.calls = []  # ("pull" | "push", table, keys)
        self._lock = threading.Lock()

    def create_table(self, name, *, dim, durability, memory_bytes, **options):
        with self._lock:
            self.tables.setdefault(name, LocalTable.create(name, dim, **options))

    def pull_unique(self, name, keys, *, read_only):
        with self._lock:
            self.calls.append(("pull", name, keys.tolist()))
            return self.tables[name].pull(keys, read_only)

    def push_async(self, name, keys, grads):
        with self._lock:
            self.calls.append(("push", name, keys.tolist()))
            self.tables[name].push(keys, grads)
        done = Future()
        done.set_result(None)
        return done


class Peers:
    """The workers of a neighbouring stage, whose inboxes get each frame as it is on the wire."""

    def __init__(self, inboxes, rank):
        self._inboxes = inboxes
        self._rank = rank

    def send(self, frame):
        head, payload = codec.unpack(stage_pb2.Frame, frame.pack(self._rank))
        target = frame.id.micro_batch % len(self._inboxes)
        self._inboxes[target].put(Frame.unpack(head, payload))

    def end(self, phase):
        for inbox in self._inboxes:
            inbox.end(phase, self._rank)

    def close(self):
        pass


@dataclass
class Steps:
    """A dataset of given batches, each one step: a worker's are those of its micro-batches."""

    steps: list[Batch]
    micro_batches: int

    def batches(self, batch_size, *, shard, num_shards, **_):
        for batch in self.steps:
            size = len(batch.label) // self.micro_batches
            mine = np.concatenate(
                [
                    np.arange(m * size, (m + 1) * size)
                    for m in range(shard, self.micro_batches, num_shards)
                ]
            )
            assert len(mine) == batch_size
            yield Batch(*(getattr(batch, name)[mine] for name in Batch.__dataclass_fields__))


@dataclass
class Worker:
    """What one worker was made of."""

    place: Place
    module: nn.Module
    rows: StageRows
    executor: StageExecutor


class Pipeline:
    """All workers of a job.

    Args:
        build: makes the model, each time the same.
        cuts: the last layer of each stage.
        widths: workers of each stage.
    """

    def __init__(
        self, job: JobSpec, build, cuts, widths, steps, micro_batches, client=None, between=None
    ):
        self.client = client or Tables()
        self._job, self._build, self._cuts, self._widths = job, build, cuts, tuple(widths)
        self._between = between or (lambda worker: None)
        size = len(steps[0].label) // micro_batches
        self._schedule = Schedule(micro_batches, size, widths[0], len(steps), len(steps))
        self._dataset = Steps(steps, micro_batches)
        self._stop = threading.Event()
        self._inboxes = [[Inbox(self._stop) for _ in range(width)] for width in widths]
        self._rings = [
            local_rings(width, self._stop.is_set) if width > 1 else [None] for width in widths
        ]

    def run(self):
        """Train; the workers by stage and rank."""
        places = [Place(s, r, self._widths) for s, w in enumerate(self._widths) for r in range(w)]
        graphs = [self._graph(place.stage) for place in places]  # tracing is no work for threads
        with ThreadPoolExecutor(len(places)) as pool:
            futures = [pool.submit(self._work, *pair) for pair in zip(places, graphs, strict=True)]
            try:
                workers = [future.result(LIMIT_S) for future in futures]
            finally:
                self._stop.set()
                for ring in (ring for rings in self._rings for ring in rings if ring is not None):
                    ring.close()
        return [[w for w in workers if w.place.stage == s] for s in range(len(self._widths))]

    def _graph(self, stage):
        first = self._cuts[stage - 1] + 1 if stage else 0
        return TracedModel(self._build()).stage(first, self._cuts[stage])

    def _work(self, place, graph):
        try:
            worker = self._made(place, graph)
            source = None
            if place.stage == 0:
                source = TrainingSource(
                    *(self._job, self._dataset, self._schedule, place.rank, worker.rows),
                    *(self._stop, worker.executor.upload),
                )
            worker.executor.train(source)
            self._between(worker)
            worker.rows.close()
            return worker
        except BaseException:
            self._stop.set()
            raise

    def _made(self, place, graph):
        stage, job, staging, precision = place.stage, self._job, OnHost(), Precision.of("", CPU)
        group = StageGroup(CPU, self._rings[stage][place.rank])
        bound = StalenessBound(job.train.staleness, self._stop, ordered=stage == 0)
        rows = StageRows(
            graph.module, graph.lookups, self.client, bound, staging, "job.", job.servers
        )

        def outbox(other):
            if not 0 <= other < len(self._widths):
                return None
            return Outbox(Peers(self._inboxes[other], place.rank), staging)

        links = Links(self._inboxes[stage][place.rank], outbox(stage - 1), outbox(stage + 1))
        layers = StageLayers(graph, rows, group, CPU, staging, precision)
        update = Update(job, graph.module, group, self._schedule.steps, precision)
        executor = StageExecutor(job, layers, place, links, self._schedule, update, self._stop)
        return Worker(place, graph.module, rows, executor)
