"""Workers of one to three stages against plain PyTorch on the same batches."""

import threading
import time
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from protos.job_pb2 import JobSpec
from scheduler.problem.steps import Steps, in_flight
from tests.workers.stage.in_process import Pipeline, most_held
from workers.data.columns.arrays import Batch
from workers.embedding.sparse import SparseEmbedding
from workers.errors import PeerLostError
from workers.learning.optimizers import make_optimizer, make_schedule
from workers.stage.running import evaluation
from workers.stage.running.executor import StageExecutor
from workers.stage.running.layers import StageLayers
from workers.stage.steps.schedule import Schedule

STEPS, SAMPLES = 4, 24


class Penalised(nn.Module):
    """Passes on what it is given, and would have it small."""

    aux_loss = None

    def forward(self, x):
        self.aux_loss = 0.1 * x.square().mean()
        return x


class Dense(nn.Module):
    """Five layers; `aux_loss` in the second."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), Penalised()
        self.c, self.d, self.e = nn.Linear(5, 4), nn.Linear(4 + 3, 4), nn.Linear(4, 1)

    def forward(self, dense):
        x = self.c(self.b(self.a(dense)).tanh())
        return self.e(self.d(torch.cat([x, dense], dim=1)).relu())


class Sparse(nn.Module):
    """Embeddings at both ends of a dense layer."""

    def __init__(self):
        super().__init__()
        self.first = SparseEmbedding("one", 3, optimizer="sgd", learning_rate=0.5, scale=1.0)
        self.middle = nn.Linear(6, 4)
        self.second = SparseEmbedding("two", 4, optimizer="sgd", learning_rate=0.5, scale=1.0)
        self.top = nn.Linear(4, 1)

    def forward(self, sparse):
        x = self.middle(self.first(sparse).flatten(1)).tanh()
        return self.top(x + self.second(sparse).sum(1))


def seeded(model):
    def build():
        torch.manual_seed(7)
        return model()

    return build


def job_of(optimizer="adam", loss="bce_with_logits", **train):
    job = JobSpec()
    job.train.loss = loss
    job.train.epochs = 1
    job.train.optimizer.name = optimizer
    job.train.optimizer.learning_rate = 0.05
    for key, value in train.items():
        setattr(job.train, key, value)
    return job


def batches(dtype):
    random = np.random.default_rng(0)
    return [
        Batch(
            {
                "sparse": random.integers(0, 9, (SAMPLES, 2)),
                "dense": random.normal(size=(SAMPLES, 3)).astype(dtype),
                "label.label": random.integers(0, 2, SAMPLES).astype(dtype),
            }
        )
        for _ in range(STEPS)
    ]


def plain(build, job, steps):
    """The model after training on whole batches, and each step's loss."""
    model, losses = build(), []
    optimizer = make_optimizer(job.train.optimizer, list(model.parameters()))
    rate = make_schedule(job.train.optimizer, optimizer, len(steps))
    for batch in steps:
        given = "dense" if isinstance(model, Dense) else "sparse"
        out = model(torch.from_numpy(batch[given]))
        label = torch.from_numpy(batch["label.label"])
        function = nn.functional.mse_loss if job.train.loss == "mse" else None
        loss = (function or nn.functional.binary_cross_entropy_with_logits)(out.reshape(-1), label)
        (loss + model.b.aux_loss if isinstance(model, Dense) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rate is not None:
            rate.step()
        losses.append(loss.item())
    return model, losses


def check(workers, model, losses, tolerance):
    expected = model.state_dict()
    seen = set()
    for worker in (w for stage in workers for w in stage):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)
            seen.add(name)
        assert worker.executor.progress.step == STEPS
        assert worker.executor.progress.samples == STEPS * SAMPLES
    assert seen == expected.keys()
    for worker in workers[-1]:
        assert worker.executor.progress.losses == pytest.approx(losses, rel=tolerance)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("cuts", "widths", "micro_batches"),
    [
        ([4], [1], 1),
        ([4], [1], 3),
        ([4], [2], 4),
        ([4], [3], 6),
        ([1, 4], [1, 1], 1),
        ([0, 4], [1, 1], 8),
        ([2, 4], [2, 1], 4),
        ([1, 4], [1, 2], 3),
        ([2, 4], [3, 2], 6),
        ([0, 2, 4], [1, 2, 1], 4),
        ([0, 2, 4], [2, 1, 3], 12),
    ],
)
def test_equals_plain_pytorch(float64, cuts, widths, micro_batches):
    job, build, steps = job_of(), seeded(Dense), batches(np.float64)
    workers = Pipeline(job, build, cuts, widths, steps, micro_batches).run()
    check(workers, *plain(build, job, steps), tolerance=1e-10)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_equals_plain_pytorch_with_another_loss_and_rate(float64, optimizer):
    job, build, steps = job_of(optimizer, "mse"), seeded(Dense), batches(np.float64)
    job.train.optimizer.schedule = "cosine"
    job.train.optimizer.warmup_steps = 1
    workers = Pipeline(job, build, [1, 4], [1, 2], steps, 4).run()
    check(workers, *plain(build, job, steps), tolerance=1e-10)


@pytest.mark.parametrize(
    ("cuts", "widths", "micro_batches"),
    [([3], [1], 1), ([3], [1], 4), ([1, 3], [1, 1], 3), ([1, 3], [1, 2], 4)],
)
def test_rows_learn_as_in_plain_pytorch(cuts, widths, micro_batches):
    job, build, steps = job_of("sgd"), seeded(Sparse), batches(np.float32)
    pipeline = Pipeline(job, build, cuts, widths, steps, micro_batches)
    model, losses = plain(build, job, steps)
    check(pipeline.run(), model, losses, tolerance=1e-5)
    keys = np.arange(9, dtype=np.uint64)
    for layer in (model.first, model.second):
        learned = pipeline.client.tables[f"3.job.{layer.spec.table}"].pull(keys, True)
        np.testing.assert_allclose(learned, layer.store.pull(keys, True), rtol=1e-5, atol=1e-5)


def test_repeats_bit_for_bit():
    job, build, steps = job_of(), seeded(Dense), batches(np.float32)
    first, second = (Pipeline(job, build, [2, 4], [2, 3], steps, 6).run() for _ in range(2))
    for one, other in zip(chain(*first), chain(*second), strict=True):
        assert one.executor.progress.losses == other.executor.progress.losses
        for name, value in one.module.state_dict().items():
            assert torch.equal(value, other.module.state_dict()[name])


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_rows_lag_by_the_staleness_whatever_the_timing(staleness):
    job = job_of("sgd", staleness=staleness)
    pipeline = Pipeline(job, seeded(Sparse), [3], [1], batches(np.float32), 2)
    pipeline.run()
    calls = [kind for kind, table, _ in pipeline.client.calls if table == "3.job.one"]
    seen = [calls[:at].count("commit") for at, kind in enumerate(calls) if kind == "pull"]
    assert seen == [max(0, step - staleness) for step in range(STEPS)]
    assert calls.count("commit") == STEPS


@pytest.mark.parametrize(("cuts", "widths"), [([4], [1]), ([4], [2]), ([1, 4], [2, 3])])
def test_held_out_samples_are_predicted_once_each(float64, monkeypatch, cuts, widths):
    job, build, steps = job_of(), seeded(Dense), batches(np.float64)
    samples = batches(np.float64)[0]

    def given(job, split, size, rank, workers, stopped):
        assert split == "valid"
        for number in range(rank, SAMPLES // 4, workers):
            part = slice(number * 4, number * 4 + 4)
            yield (
                number,
                {
                    "dense": torch.from_numpy(samples["dense"][part]),
                    "label.label": torch.from_numpy(samples["label.label"][part]),
                },
            )

    found = {}

    def between(worker):
        one = worker.executor.evaluate("valid")
        found[worker.place.stage, worker.place.rank] = one.found
        worker.executor.drain()

    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    Pipeline(job, build, cuts, widths, steps, 6, between=between).run()
    model, _ = plain(build, job, steps)
    scores = model(torch.from_numpy(samples["dense"])).detach().reshape(-1).float()
    for (stage, _), taken in found.items():
        if stage < len(widths) - 1:
            assert not taken
            continue
        torch.testing.assert_close(taken["score."], scores, rtol=0, atol=1e-6)  # in their order
        assert taken["truth."].tolist() == samples["label.label"].tolist()


def test_who_waits_for_input_hears_of_a_worker_that_is_gone():
    connected, never = threading.Barrier(4), threading.Event()

    class Connected(Pipeline):
        def _made(self, place, graph):
            worker = super()._made(place, graph)
            connected.wait(60)
            return worker

    pipeline = Connected(job_of(), seeded(Dense), [2, 4], [1, 3], batches(np.float32), 6)

    def read(*_):
        pipeline._rings[1][1]._hang_up()  # as the kernel does for one that was killed
        never.wait(60)

    pipeline._batches.read = read
    with pytest.raises(PeerLostError, match="of the stage"):
        pipeline.run()
    never.set()


class Together(Pipeline):
    """Workers that compute in lockstep, as those do that share out experts."""

    def __init__(self, job, build, cuts, widths, steps, micro_batches, **how):
        super().__init__(job, build, cuts, widths, steps, micro_batches, **how)
        samples = self._batches.samples
        self._schedule = Schedule(len(steps), samples, micro_batches, lockstep=widths)

    def _made(self, place, graph):
        worker = super()._made(place, graph)
        worker.executor._lockstep = True
        return worker


@pytest.mark.parametrize(
    ("order", "staleness"),
    [("free", 0), ("free", 2), ("whole_batch", 0), ("whole_batch", 2), ("lockstep", 0)],
)
def test_no_worker_holds_more_than_is_planned(monkeypatch, order, staleness):
    widths, parts = (2, 3, 1), 14
    job = job_of(loss="pairwise" if order == "whole_batch" else "mse", staleness=staleness)
    job.data.label = "label"
    kind = Together if order == "lockstep" else Pipeline
    pipeline = kind(job, seeded(Dense), [0, 2, 4], widths, batches(np.float32), parts)
    most = most_held(monkeypatch)
    pipeline.run()
    cut = pipeline._schedule.micro_batches
    planned = Steps(staleness, parts, SAMPLES, **({} if order == "free" else {order: True}))
    for stage, width in enumerate(widths):
        assert most[stage] / cut <= in_flight(widths, stage, planned) / parts
        if order == "whole_batch" or (order == "lockstep" and stage < 2):
            assert most[stage] >= cut // width, "all of a step"


def test_forwards_come_first_until_the_stages_have_something_to_do(monkeypatch):
    """Of one worker before three, although gradients are back after each forward."""
    order, computed = [], (StageExecutor._forward, StageExecutor._backward)

    def forward(executor):
        computed[0](executor)
        order.append("F")
        time.sleep(0.1)  # until its gradient is back

    def backward(executor):
        computed[1](executor)
        order.append("B")

    monkeypatch.setattr(StageExecutor, "_forward", forward)
    monkeypatch.setattr(StageExecutor, "_backward", backward)
    pipeline = Pipeline(job_of(), seeded(Dense), [2, 4], [1, 3], batches(np.float32)[:1], 6)
    pipeline.run()
    assert "".join(order) == "FFFFBFBFBBBB"


@pytest.mark.parametrize("held_out", [7, 1, 0])
@pytest.mark.parametrize("trained", [0, STEPS])
def test_workers_in_lockstep_predict_as_often_whoever_has_a_batch(monkeypatch, trained, held_out):
    """Also where nothing was trained before, as of a job that goes on from its last cut."""
    widths, steps = (2, 3), batches(np.float32)
    job, ran, trainings = job_of(), Counter(), StageLayers.run

    def run(layers, tensors):
        if not layers.graph.module.training:
            ran[id(layers)] += 1
        return trainings(layers, tensors)

    def given(job, split, size, rank, workers, stopped):
        for number in range(rank, held_out, workers):
            part = {"dense": steps[0]["dense"][number : number + 2]}
            part["label.label"] = steps[0]["label.label"][number : number + 2]
            yield number, {name: torch.from_numpy(array) for name, array in part.items()}

    monkeypatch.setattr(StageLayers, "run", run)
    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    found = []

    def predict(worker):
        found.append((worker.place, worker.executor.evaluate("valid").found))

    model = [seeded(Dense), [2, 4], widths]
    Together(job, *model, steps[:trained], 6, between=predict).run()
    times = [-(-held_out // width) for width in widths for _ in range(width)]
    assert sorted(ran.values()) == sorted(time for time in times if time)
    for place, taken in found:
        if place.stage and held_out:
            assert {len(values) for values in taken.values()} == {2 * held_out}
