"""The workers of a pipeline as threads of one process, with inboxes and tables in memory."""

import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from protos import stage_pb2
from protos.decision_pb2 import PlanStage
from protos.job_pb2 import JobSpec
from protos.naming import table_prefix
from protos.node_pb2 import LaunchRequest
from ps import LocalTable
from ps.local.table import save_checkpoint
from workers.data.columns.arrays import Batch
from workers.device.copies import OnHost
from workers.errors import DivergedError
from workers.learning.precision import Precision
from workers.links.all_reduce import StageGroup
from workers.links.frames import Frame
from workers.links.inbox import Inbox, Stopped
from workers.links.notices import NoticeBoard
from workers.links.outbox import Outbox
from workers.links.pipeline import Links, Place
from workers.links.ring_port import local_rings
from workers.model.chain.trace import TracedModel
from workers.model.module.inputs import inputs_of
from workers.model.module.randomness import Randomness
from workers.model.module.statistics import RunningStatistics
from workers.model.objective.metrics import JobMetrics
from workers.offload.training.suited import rooms_of
from workers.stage.cuts.beginning import beginning_of
from workers.stage.cuts.judge import CutFacts
from workers.stage.cuts.state import base_names
from workers.stage.experts.offloading import take_out
from workers.stage.experts.outside import built_in, folder_of, outside_of
from workers.stage.parts import Parts, assemble
from workers.stage.restoring import restore_best
from workers.stage.rows.ahead import StageRows
from workers.stage.rows.source import TrainingSource
from workers.stage.running.executor import StageExecutor
from workers.stage.running.layers import StageLayers
from workers.stage.steps.schedule import Schedule
from workers.stage.update.update import Update

CPU = torch.device("cpu")
LIMIT_S = 120.0  # only a hang reaches it
TABLES = table_prefix("job")


class Asked:
    """A pull of several tables, which a commit may take along."""

    def __init__(self, pull):
        self._pull = pull
        self._rows = None

    def prepare(self):
        pass

    def come(self):
        self._rows = self._pull()

    def run(self):
        return self._pull() if self._rows is None else self._rows

    def give_up(self):
        pass


class Tables:
    """A parameter client of tables in this process; says what was pulled and committed."""

    def __init__(self):
        self.tables = {}
        self.saves = []  # mode and parent
        self.calls = []  # ("pull" | "commit", table, keys)
        self._lock = threading.Lock()
        self._staged = defaultdict(dict)  # series and step -> slot -> part
        self._over = set()

    def create_table(self, name, *, dim, durability, **options):
        with self._lock:
            self.tables.setdefault(name, LocalTable.create(name, dim, **options))

    def pull_many(self, keys, *, read_only, distinct):
        assert distinct
        with self._lock:
            self.calls += [("pull", name, some.tolist()) for name, some in keys.items()]
            return {name: self.tables[name].pull(some, read_only) for name, some in keys.items()}

    def ask_many(self, keys, *, read_only, distinct):
        return Asked(
            lambda: [*self.pull_many(keys, read_only=read_only, distinct=distinct).values()]
        )

    def stage_async(self, series, step, slot, parts, *, distinct):
        for keys, *_ in parts.values():
            assert distinct
            assert len(np.unique(keys)) == len(keys)
        with self._lock:
            assert (series, step) not in self._over
            self._staged[series, step][slot] = {
                name: tuple(array.copy() for array in arrays) for name, arrays in parts.items()
            }
        return _done()

    def tally(self, series, step, slots):
        with self._lock:
            sums = [grads.astype(np.float64) for _, grads in self._summed(series, step, slots)]
        squared = sum(float((grads**2).sum()) for grads in sums)
        return Tally(squared, bool(np.isfinite(squared)))

    def commit_async(
        self,
        series,
        step,
        slots,
        *,
        scale=1.0,
        rate=1.0,
        parts=None,
        distinct=False,
        shrink=(),
        along=None,
        here=False,
    ):
        if parts is not None:
            self.stage_async(series, step, 0, parts, distinct=distinct)
        with self._lock:
            for (name, keys), grads in self._summed(series, step, slots):
                self.calls.append(("commit", name, keys.tolist()))
                used = self._used(series, step, name, keys)
                self.tables[name].push(
                    keys, np.float32(scale) * grads, rate=rate, step=step, **used
                )
            self._end(series, step, shrink)
        if along is not None:
            along.come()
        return _done()

    def discard_async(self, series, step, *, shrink=()):
        with self._lock:
            self._end(series, step, shrink)
        return _done()

    def save(self, place, *, prefix, mode, since, held):
        """As of shards: what is committed once `held` was called is not in it."""
        self.saves.append((mode, since))
        with self._lock:
            held()
            save_checkpoint(
                place, [t for name, t in self.tables.items() if name.startswith(prefix)]
            )

    def load(self, place, *, rename):
        before, after = rename
        with self._lock:
            for name, table in LocalTable.load_checkpoint(place).items():
                self.tables[after + name.removeprefix(before)] = table

    def _summed(self, series, step, slots):
        """Of every table the gradients of all parts, summed in the order of slots."""
        staged = self._staged[series, step]
        assert sorted(staged) == list(range(slots))
        for name in sorted({name for part in staged.values() for name in part}):
            pairs = [staged[slot][name] for slot in range(slots) if name in staged[slot]]
            keys, inverse = np.unique(
                np.concatenate([pair[0] for pair in pairs]), return_inverse=True
            )
            sums = np.zeros((len(keys), pairs[0][1].shape[1]), np.float32)
            np.add.at(sums, inverse, np.concatenate([pair[1] for pair in pairs]))
            yield (name, keys), sums

    def _used(self, series, step, name, keys):
        """Shows and clicks of a table's keys, summed over slots; nothing where none are counted."""
        found = {key: np.zeros(2, np.float32) for key in keys.tolist()}
        counted = False
        for part in self._staged[series, step].values():
            for own, _, *usage in [part[name]] if name in part else []:
                for key, used in zip(own.tolist(), usage[0].T if usage else (), strict=False):
                    counted = True
                    found[key] += used
        shows, clicks = np.stack([found[key] for key in keys.tolist()], 1)
        return {"shows": shows, "clicks": clicks} if counted else {}

    def _end(self, series, step, shrink=()):
        if (series, step) not in self._over:
            for name in shrink:
                self.tables[name].shrink(step=step)
        self._staged.pop((series, step), None)
        self._over.add((series, step))


def _done():
    done = Future()
    done.set_result(None)
    return done


@dataclass(frozen=True)
class Tally:
    squared_norm: float
    finite: bool


class Told:
    """Tells the other workers as over the wire, each on its board."""

    def __init__(self, own, boards):
        self.board = boards[own[0]][own[1]]
        self._own, self._boards = own, boards

    def tell(self, to, kind, step, **facts):
        stage, rank = self._own
        notice = stage_pb2.Notice(kind=kind, step=step, stage=stage, rank=rank, **facts)
        self._boards[to[0]][to[1]].put(stage_pb2.Notice.FromString(notice.SerializeToString()))

    def check(self):
        pass

    def flush(self):
        pass

    def close(self):
        pass


class Peers:
    """The workers of a neighbouring stage, whose inboxes get each frame as it is on the wire."""

    def __init__(self, inboxes, rank):
        self._inboxes = inboxes
        self._rank = rank

    def send(self, frame):
        head, payload = frame.parts(self._rank)
        came = Frame.unpack(stage_pb2.Frame.FromString(head), memoryview(b"".join(payload)))
        self._inboxes[frame.id.micro_batch % len(self._inboxes)].put(came)

    def end(self, phase):
        for inbox in self._inboxes:
            inbox.end(phase, self._rank)

    def close(self):
        pass


@dataclass
class Steps:
    """Global batches that are given."""

    steps: list[Batch]

    def samples(self, step):
        return len(self.steps[step])

    def read(self, step, first, last):
        return self.steps[step].slice(first, last)

    def labels(self, step):
        return self.steps[step].labels


@dataclass
class Worker:
    """What one worker was made of."""

    place: Place
    module: nn.Module
    rows: StageRows
    executor: StageExecutor
    update: Update
    parts: Parts
    diverged: str = ""


class Pipeline:
    """All workers of a job.

    Args:
        build: makes the model, each time the same.
        cuts: the last layer of each stage.
        widths: workers of each stage.
        folder: where cuts are taken; "" for none.
        resume: the place of one to go on from.
        generation: of the attempt's workers, who go back to it.
        restores: whether the best state by validation is made the model, as at the end of a job.
    """

    def __init__(
        self,
        job: JobSpec,
        build,
        cuts,
        widths,
        steps,
        micro_batches,
        client=None,
        between=None,
        told=Told,
        folder="",
        resume="",
        attempt=1,
        generation=0,
        restores=False,
    ):
        self._restores = restores
        self.client = client or Tables()
        self._job, self._build, self._cuts, self._widths = job, build, cuts, tuple(widths)
        self._between = between or (lambda worker: None)
        self._batches = Steps(steps)
        self._schedule = Schedule(len(steps), self._batches.samples, micro_batches)
        self._stop, self._loaded = threading.Event(), threading.Event()
        self._folder = folder_of(job)
        self._inboxes = [[Inbox(self._stop) for _ in range(width)] for width in widths]
        self._boards = [[NoticeBoard(inbox.wake) for inbox in some] for some in self._inboxes]
        self._told = told
        self._where, self._resume, self._attempt = str(folder), str(resume), attempt
        self._generation = generation
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
                failed = [f.exception(LIMIT_S) for f in futures]
                for error in failed:
                    if error is not None and not isinstance(error, Stopped):
                        raise error  # others were told to stop then
                workers = [future.result() for future in futures]
            finally:
                self._stop.set()
                for ring in (ring for rings in self._rings for ring in rings if ring is not None):
                    ring.close()
        return [[w for w in workers if w.place.stage == s] for s in range(len(self._widths))]

    def _graph(self, stage):
        first = self._cuts[stage - 1] + 1 if stage else 0
        with built_in(self._folder):
            traced = TracedModel(self._build(), inputs_of(self._job.data))
        self._layers = [layer.name for layer in traced.layers]
        if self._folder is not None:
            self._rooms = rooms_of(self._job, traced.model)
        return traced.stage(first, self._cuts[stage])

    def _work(self, place, graph):
        try:
            worker = self._made(place, graph)
            executor, source = worker.executor, None
            if place.stage == 0:
                source = TrainingSource(
                    *(self._batches, executor.own),
                    range(executor.progress.step, self._schedule.steps),
                    *(self._job.train.staleness, worker.rows),
                    *(executor.upload, self._inboxes[place.stage][place.rank], executor.loss),
                )
            try:
                executor.train(source)
            except DivergedError as error:
                worker.diverged = str(error)
            if self._restores:
                launch = self._launch(place.stage)
                share = SimpleNamespace(place=place, launch=launch, folder=self._folder)
                restore_best(share, worker.parts, self._where)
            self._between(worker)
            return worker
        except BaseException:
            self._stop.set()
            raise
        finally:
            self._inboxes[place.stage][place.rank].close()
            if (outside := outside_of(graph.module)) is not None:
                outside.close()

    def _made(self, place, graph):
        stage, rank, staging = place.stage, place.rank, OnHost()
        launch = self._launch(stage)
        beginning = beginning_of(
            *(launch, graph, self._job.train.staleness),
            place=launch.resume,
            folder=self._folder,
        )
        if beginning.tables and stage == rank == 0:
            self.client.load(beginning.tables, rename=beginning.rename)
            self._loaded.set()
        if beginning.tables:
            assert self._loaded.wait(LIMIT_S)
        facts = CutFacts(
            *("job", self._job, self._attempt, base_names(self._layers)),
            *(self._job.train.staleness, self._schedule.micro_batches, TABLES, self._generation),
        )

        def outbox(other):
            if not 0 <= other < len(self._widths):
                return None
            return Outbox(Peers(self._inboxes[other], rank), staging)

        group = StageGroup(CPU, self._rings[stage][rank])
        if self._folder is not None:
            kept = beginning.state.optimizer if beginning.state is not None else {}
            take_out(
                *(self._job, graph.module, group, CPU, self._folder, self._rooms),
                *(self._schedule.steps, beginning.step, beginning.applied, kept),
            )
        parts = assemble(
            self._job,
            place,
            StageLayers(
                graph,
                group,
                CPU,
                staging,
                Precision.of(self._job.train.precision, CPU),
                Randomness(graph.module, self._job.train.seed, fixed=True),
                RunningStatistics(graph.module, place.width),
            ),
            Links(self._inboxes[stage][rank], outbox(stage - 1), outbox(stage + 1)),
            self._told((stage, rank), self._boards),
            self.client,
            self._schedule,
            self._job.train.staleness,
            TABLES,
            beginning,
            facts,
            (lambda: self._where) if self._where else None,
            over=self._generation,
        )
        return Worker(place, graph.module, parts.rows, parts.executor, parts.update, parts)

    def _launch(self, stage):
        firsts = [0, *(cut + 1 for cut in self._cuts[:-1])]
        return LaunchRequest(
            job_id="job",
            job=self._job,
            index=stage,
            stages=[PlanStage(first=f, last=c) for f, c in zip(firsts, self._cuts, strict=True)],
            layers=self._layers,
            resume=self._resume,
            attempt=self._attempt,
        )


def measuring(job, found, split="valid"):
    """What has each worker evaluate `split` after its steps; the metrics go into `found`."""

    def between(worker):
        measured = worker.executor.evaluate(split)
        if worker.place.leads:
            found.append(JobMetrics(job).measure(measured.found, split))
        worker.executor.drain()

    return between


def most_held(monkeypatch):
    """The most micro-batches that a worker of each stage has between forward and backward."""
    found = defaultdict(int)
    computed = StageExecutor._forward, StageExecutor._forward_backward

    def forward(executor):
        computed[0](executor)
        stage = executor._place.stage
        found[stage] = max(found[stage], len(executor._in_flight))

    def at_once(executor):
        found[executor._place.stage] = 1
        computed[1](executor)

    monkeypatch.setattr(StageExecutor, "_forward", forward)
    monkeypatch.setattr(StageExecutor, "_forward_backward", at_once)
    return found
