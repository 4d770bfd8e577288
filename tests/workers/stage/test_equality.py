"""Random plans against one process of plain PyTorch, and against themselves under any timing."""

import math
import random
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from protos.job_pb2 import JobSpec
from ps import LocalTable
from tests.workers.stage import reference
from tests.workers.stage.in_process import Pipeline, Tables, Told
from workers.data.columns.arrays import Batch
from workers.embedding.sparse import SparseEmbedding
from workers.links import step_sum
from workers.links.ring import Ring
from workers.moe.layer import MoE
from workers.stage.update.ending import Ending

KEYS = 11


@pytest.fixture(autouse=True)
def _sums_begin_in_backward(monkeypatch):
    """Buckets so small that models of this size fill some while their backward runs."""
    monkeypatch.setattr(step_sum, "_BUCKET", 16)


SETTINGS = {
    "momentum": (("momentum", 0.5),),
    "adagrad": (("eps", 1e-4), ("initial_accumulator", 0.3)),
    "rowwise_adagrad": (("eps", 1e-4), ("initial_accumulator", 0.3)),
    "adam": (("betas", (0.8, 0.95)), ("eps", 1e-4)),
    "adamw": (("betas", (0.8, 0.95)), ("eps", 1e-4)),
}
DENSE = ("sgd", "momentum", "adagrad", "adam", "adamw")
ROWS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw")


class Penalised(nn.Module):
    """Passes on what it is given, and would have it small."""

    aux_loss = None

    def forward(self, x):
        self.aux_loss = 0.1 * x.square().mean()
        return x


class Net(nn.Module):
    """Embeddings at both ends of dense layers; each name is a layer."""

    def __init__(self, first, second, small):
        super().__init__()
        self.first = first
        self.middle = nn.Linear(6, 4)
        self.small = small
        self.second = second
        self.top = nn.Linear(4, 1)

    def forward(self, sparse):
        x = self.small(torch.tanh(self.middle(self.first(sparse).flatten(1))))
        return self.top(nn.functional.gelu(x + self.second(sparse).sum(1)))


LAYERS = 5
TABLES = ("one", 3), ("two", 4)
MIXTURE = {"capacity_factor": 1.25, "balance_weight": 0.1, "z_weight": 0.01, "seed": 5}


@dataclass(frozen=True)
class Case:
    """A job, its batches and a plan for it."""

    job: JobSpec
    sizes: tuple[int, ...]  # samples of each step
    row_optimizer: str
    row_decay: float
    cuts: tuple[int, ...]
    widths: tuple[int, ...]
    micro_batches: int
    row_settings: tuple[tuple[str, object], ...] = ()  # of the rows' optimizer
    experts: int = 0  # of a mixture in the middle, which sees a micro-batch whole; 0: none

    def options(self):
        options = {"learning_rate": 0.05, "weight_decay": self.row_decay}
        return {"optimizer": self.row_optimizer, "scale": 1.0, **options, **dict(self.row_settings)}

    def model(self):
        torch.manual_seed(7)
        first, second = (SparseEmbedding(*table, **self.options()) for table in TABLES)
        small = MoE(4, self.experts, 5, 2, **MIXTURE) if self.experts else Penalised()
        return Net(first, second, small)

    def batches(self):
        generator = np.random.default_rng(0)
        return [
            Batch(
                {
                    "sparse": generator.integers(0, KEYS, (size, 2)),
                    "label.label": generator.integers(0, 2, size).astype(np.float32),
                }
            )
            for size in self.sizes
        ]

    def pipeline(self, **how):
        return Pipeline(
            self.job,
            self.model,
            list(self.cuts),
            list(self.widths),
            self.batches(),
            self.micro_batches,
            **how,
        )

    def reference(self, after=lambda step, dense, rows: False):
        model, tables = self.model(), {}
        for name in ("first", "second"):
            spec = getattr(model, name).spec
            table = LocalTable.create(spec.table, **spec.table_options())
            rows = torch.from_numpy(table.pull(np.arange(KEYS, dtype=np.uint64), True))
            setattr(model, name, reference.Given())
            tables[name] = reference.Table(
                rows, self.row_optimizer, 0.05, self.row_decay, dict(self.row_settings)
            )

        def forward(model, batch):
            samples = len(batch)
            count = min(self.micro_batches, samples) if self.experts else 1
            loss = auxiliary = 0.0
            for index in range(count):
                part = slice(samples * index // count, samples * (index + 1) // count)
                out = model(torch.from_numpy(batch["sparse"][part])).reshape(-1)
                label = torch.from_numpy(batch["label.label"][part])
                weight = len(label) / samples
                loss += weight * nn.functional.binary_cross_entropy_with_logits(out, label)
                auxiliary += weight * model.small.aux_loss
            return loss, auxiliary, set(batch["sparse"].ravel().tolist())

        return reference.train(model, tables, forward, self.job, self.batches(), after)


def job_of(dense="adam", staleness=0, **train):
    job = JobSpec()
    job.train.loss = "bce_with_logits"
    job.train.staleness = staleness
    job.train.optimizer.name = "sgd" if dense == "momentum" else dense
    job.train.optimizer.learning_rate = 0.02
    if dense == "momentum":
        job.train.optimizer.momentum = 0.9
    for key, value in train.items():
        setattr(job.train, key, value)
    return job


@st.composite
def cases(draw):
    job = job_of(
        draw(st.sampled_from(DENSE)), draw(st.integers(0, 2)), clip=draw(st.sampled_from((0, 0.05)))
    )
    job.train.optimizer.weight_decay = draw(st.sampled_from((0, 0.01)))
    for spec in (job.train.optimizer, job.train.rows):
        spec.schedule = draw(st.sampled_from(("constant", "cosine")))
        spec.warmup_steps = draw(st.integers(0, 2))
    spec, rows = job.train.optimizer, draw(st.sampled_from(ROWS))
    if spec.momentum:
        spec.momentum = draw(st.sampled_from((0.5, 0.9)))
    if spec.name in ("adam", "adamw"):
        spec.betas.extend(draw(st.sampled_from(((), (0.8, 0.95)))))
    if spec.name != "sgd":
        spec.eps = draw(st.sampled_from((0.0, 1e-4)))
    stages = draw(st.integers(1, 4))
    cuts = sorted(draw(st.permutations(range(LAYERS - 1)))[: stages - 1])
    batch, last = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    epoch = [batch, batch, min(batch, last)]
    return Case(
        job,
        tuple(epoch + epoch),
        rows,
        draw(st.sampled_from((0.0, 0.01))),
        (*cuts, LAYERS - 1),
        tuple(draw(st.integers(1, 3)) for _ in range(stages)),
        draw(st.integers(1, 7)),
        draw(st.sampled_from(((), SETTINGS[rows]))) if rows in SETTINGS else (),
        draw(st.sampled_from((0, 0, 3))),
    )


def check(case, tolerance):
    expected = case.reference()
    pipeline = case.pipeline()
    workers = pipeline.run()
    state = expected.model.state_dict()
    seen = set()
    for worker in chain(*workers):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=tolerance, atol=tolerance)
            seen.add(name)
        assert worker.executor.progress.step == len(case.sizes)
        assert worker.executor.progress.samples == sum(case.sizes)
    assert seen == state.keys()
    for worker in workers[-1]:
        assert worker.executor.progress.losses == pytest.approx(expected.losses, rel=1e-5)
    keys = np.arange(KEYS, dtype=np.uint64)
    for name, table in (("first", "3.job.one"), ("second", "3.job.two")):
        rows = torch.from_numpy(pipeline.client.tables[table].pull(keys, True))
        torch.testing.assert_close(
            rows, expected.tables[name].values(), rtol=tolerance, atol=tolerance
        )


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_plan_trains_as_plain_pytorch(case):
    check(case, 2e-5)


@pytest.mark.exhaustive
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(cases())
def test_many_plans_train_as_plain_pytorch(case):
    check(case, 2e-5)


def wide(staleness=0, *, cuts=(0, 2, 4), widths=(2, 3, 2), **train):
    """Rows in the first and the last stage, each of several workers."""
    job = job_of("adam", staleness, **train)
    return Case(job, (13,) * 30, "adagrad", 0.0, cuts, widths, 5)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_losses_of_30_steps_are_those_of_plain_pytorch(staleness):
    check(wide(staleness, clip=0.3), 1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_losses_of_200_steps_of_a_smooth_model_are_those_of_plain_pytorch(staleness):
    case = replace(wide(staleness, clip=0.3), sizes=(13,) * 200)
    case.job.train.optimizer.learning_rate = 0.002
    expected = case.reference()
    for worker in case.pipeline().run()[-1]:
        assert worker.executor.progress.losses == pytest.approx(expected.losses, rel=1e-5)


def test_sums_begin_in_the_last_backward_of_each_step(monkeypatch):
    begun, begin = [], Ring.begin

    def told(ring, id_, *args, **kwargs):
        if torch._C._current_graph_task_id() >= 0:
            begun.append((id_.series, threading.get_ident()))
        return begin(ring, id_, *args, **kwargs)

    monkeypatch.setattr(Ring, "begin", told)
    case = replace(wide(1, widths=(1, 3, 2)), sizes=(13,) * 6)
    case.pipeline().run()
    # Stages of three and of two workers, five micro-batches: all have one in each step but the
    # first stage's two; what backward completes is known from the worker's first step on.
    assert {step for step, _ in begun} == set(range(1, 6))
    assert len({thread for _, thread in begun}) == 5


class Counted(Tables):
    """Says how often it was asked for rows, and given gradients or an end of a step."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def pull_many(self, keys, **how):
        self.asked.append(("pull", len(keys)))
        return super().pull_many(keys, **how)

    def stage_async(self, series, step, slot, parts, **how):
        self.asked.append(("stage", len(parts)))
        return super().stage_async(series, step, slot, parts, **how)

    def commit_async(self, *args, parts=None, **how):
        self.asked.append(("commit", len(parts or ())))
        if parts is not None:  # which the one above would count once more
            super().stage_async(*args[:2], 0, parts, distinct=True)
        return super().commit_async(*args, **how)


@pytest.mark.parametrize("workers", [1, 3])
def test_all_tables_of_a_step_are_pulled_at_once_and_pushed_at_once(workers):
    """Both tables of a stage, however many micro-batches a worker has."""
    case = replace(wide(cuts=(LAYERS - 1,), widths=(workers,)), sizes=(13,) * 7)
    counted = Counted()
    case.pipeline(client=counted).run()
    pushed = {"commit": len(TABLES)} if workers == 1 else {"stage": len(TABLES), "commit": 0}
    expected = Counter({("pull", len(TABLES)): 7 * workers})
    for kind, tables in pushed.items():
        expected[kind, tables] = 7 * (workers if kind == "stage" else 1)
    assert Counter(counted.asked) == expected


class Delayed(Tables):
    """Tables whose answers take their time."""

    def __init__(self, seed):
        super().__init__()
        self._random = random.Random(seed)

    def pull_many(self, *args, **kwargs):
        self._wait()
        rows = super().pull_many(*args, **kwargs)
        self._wait()
        return rows

    def stage_async(self, *args, **kwargs):
        self._wait()
        return super().stage_async(*args, **kwargs)

    def commit_async(self, *args, **kwargs):
        self._wait()
        done = super().commit_async(*args, **kwargs)
        self._wait()
        return done

    def _wait(self):
        time.sleep(self._random.choice((0, 0, 0, 0.002, 0.01)))


class Late(Told):
    """Notices that come late, in any order."""

    random = random.Random(0)  # models must draw from nothing global

    def tell(self, *args, **facts):
        delay = self.random.choice((0, 0, 0.002, 0.01))
        threading.Timer(delay, super().tell, args, facts).start()


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("widths", [(2, 3, 2), (1, 2, 3), (3, 1, 1)])
def test_what_is_trained_depends_on_no_timing(staleness, widths):
    runs = []
    for seed in range(3):
        case = replace(wide(staleness, widths=widths), sizes=(13,) * 6)
        pipeline = case.pipeline(client=Delayed(seed), told=Late if seed else Told)
        workers = pipeline.run()
        keys = np.arange(KEYS, dtype=np.uint64)
        rows = [
            pipeline.client.tables[name].pull(keys, True) for name in ("3.job.one", "3.job.two")
        ]
        runs.append(
            (
                workers[-1][0].executor.progress.losses,
                [w.module.state_dict() for w in chain(*workers)],
                rows,
            )
        )
    for one, other in pairwise(runs):
        assert one[0] == other[0]
        for first, second in zip(one[1], other[1], strict=True):
            assert all(torch.equal(first[name], second[name]) for name in first)
        for first, second in zip(one[2], other[2], strict=True):
            np.testing.assert_array_equal(first, second)


class Brought(Delayed):
    """Remembers whose parts of which step of which stage it has."""

    def __init__(self):
        super().__init__(0)
        self.slots = defaultdict(set)  # stage and step -> ranks

    def stage_async(self, series, step, slot, parts, *, distinct):
        time.sleep(0.01 * slot)
        done = super().stage_async(series, step, slot, parts, distinct=distinct)
        self.slots[int(series.rpartition(".")[2]), step].add(slot)
        return done


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(("cuts", "widths"), [((4,), (3,)), ((0, 4), (2, 3))])
def test_nobody_applies_a_step_before_all_parts_of_its_rows_are_staged(
    monkeypatch, staleness, cuts, widths
):
    client, found = Brought(), []
    apply = Ending.apply

    def checked(ending):
        step = ending._begun[0][0].step
        found.append([len(client.slots[stage, step]) for stage in range(len(widths))])
        return apply(ending)

    monkeypatch.setattr(Ending, "apply", checked)
    case = replace(wide(staleness, cuts=cuts, widths=widths), sizes=(13,) * 4)
    case.pipeline(client=client).run()
    assert found == [list(widths)] * (4 * sum(widths))


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize(("cuts", "widths"), [((4,), (1,)), ((4,), (2,)), ((0, 2, 4), (2, 1, 3))])
def test_a_training_that_diverges_ends_with_the_state_of_the_step_before(staleness, cuts, widths):
    at = 4
    case = replace(wide(staleness, cuts=cuts, widths=widths), sizes=(13,) * 8)
    batches = case.batches()
    batches[at]["label.label"][7] = np.nan  # as the loss of one sample is
    expected = replace(case, sizes=case.sizes[:at]).reference()
    # One that gives up later on takes none of the steps that had been begun, either.
    pipeline = case.pipeline(between=lambda worker: worker.executor.catch_up())
    pipeline._batches.steps = batches
    workers = pipeline.run()
    state = expected.model.state_dict()
    for worker in chain(*workers):
        assert f"step {at}: a loss or gradient is not finite" in worker.diverged
        assert worker.executor.progress.step == at
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-5)
    keys = np.arange(KEYS, dtype=np.uint64)
    for name, table in (("first", "3.job.one"), ("second", "3.job.two")):
        rows = torch.from_numpy(pipeline.client.tables[table].pull(keys, True))
        torch.testing.assert_close(rows, expected.tables[name].values(), rtol=1e-5, atol=1e-5)


class Spike(nn.Module):
    """Its gradient is beyond float16 in one forward of one worker."""

    count = 0

    def forward(self, x):
        self.count += 1
        if self.count == 8:
            x = x * 1.0
            x.register_hook(lambda gradient: gradient * float("inf"))
        return x


class Spiked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.spike = SparseEmbedding("one", 3, scale=1.0), Spike()
        self.middle, self.top = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, sparse):
        return self.top(torch.tanh(self.middle(self.spike(self.first(sparse).flatten(1)))))


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("cuts", "widths"), [((3,), (1,)), ((1, 3), (2, 1)), ((0, 2, 3), (1, 1, 2))]
)
def test_a_step_beyond_float16_changes_nothing_anywhere(staleness, cuts, widths):
    job = job_of("adam", staleness, precision="fp16")

    def build():
        torch.manual_seed(7)
        return Spiked()

    batches = Case(job, (12,) * 9, "adagrad", 0.0, cuts, widths, 2).batches()
    pipeline = Pipeline(job, build, list(cuts), list(widths), batches, 2)
    workers = pipeline.run()
    losses = workers[-1][0].executor.progress.losses
    assert len(losses) == len(batches)
    assert np.isfinite(losses).all()
    commits = [table for kind, table, _ in pipeline.client.calls if kind == "commit"]
    skipped = len(batches) - len(commits)
    assert skipped == 1  # the spike, and with it no other: each step commits its one table
    assert not any(worker.diverged for worker in chain(*workers))


class Worthless(nn.Module):
    """Its auxiliary loss, which has no gradient, is a number in its first two forwards alone."""

    count = 0

    def forward(self, x):
        self.count += 1
        self.aux_loss = x.detach().new_tensor(0.0 if self.count <= 2 else math.nan)
        return x


@pytest.mark.parametrize(("cuts", "widths"), [((3,), (1,)), ((1, 3), (1, 2)), ((0, 3), (2, 1))])
def test_an_auxiliary_loss_that_is_not_finite_ends_the_training(cuts, widths):
    def build():
        model = Spiked()
        model.spike = Worthless()
        return model

    job = job_of("adam")
    batches = Case(job, (12,) * 4, "adagrad", 0.0, cuts, widths, 2).batches()
    workers = Pipeline(job, build, list(cuts), list(widths), batches, 2).run()
    for worker in chain(*workers):
        assert worker.diverged.startswith("step 1:")
        assert worker.executor.progress.step == 1
