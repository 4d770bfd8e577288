"""Losses of whole batches over any plan against plain PyTorch on whole batches."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from protos.job_pb2 import HeadSpec, JobSpec, ValidateSpec
from ps import LocalTable
from tests.workers.stage import reference
from tests.workers.stage.in_process import Pipeline, measuring
from workers.data.columns.arrays import Batch
from workers.data.tensors import tensors_of
from workers.embedding.sparse import SparseEmbedding
from workers.learning.objective import ObjectiveError, total
from workers.links.inbox import Stopped
from workers.model.objective.loss import job_loss
from workers.stage.running import evaluation
from workers.stage.running.executor import PAUSED
from workers.stage.steps.schedule import Schedule
from workers.stage.update.whole_loss import WholeLoss

KEYS, FEATURES, LAST = 9, 5, 4
# Stages by their last layers, their workers, micro-batches.
PLANS = [
    ([LAST], [1], 1),
    ([LAST], [3], 12),
    ([1, LAST], [2, 3], 7),
    ([0, 1, 3, LAST], [2, 1, 3, 2], 5),
]

OWN = """
import torch
from torch.nn import functional as f
import heterps

@heterps.loss(over={"match": "batch", "delay": "weights", "late": lambda b: (b["delay"] > 0).sum()})
def total(outputs, batch):
    own = torch.arange(len(batch["delay"]))
    logits = outputs["scale"] * outputs["left"] @ outputs["right"].T
    late = batch["delay"] > 0
    return {
        "match": (f.cross_entropy(logits, own) + f.cross_entropy(logits.T, own)) / 2,
        "delay": (outputs["delay"] - batch["delay"]).square(),
        "late": (outputs["delay"] - batch["delay"])[late].abs().mean(),
    }
"""


class Scale(nn.Module):
    """A temperature, which no sample has a part in."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.7))

    def forward(self):
        return self.log.exp()


class Pairs(nn.Module):
    """Two towers, one of rows; a regression beside them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.rows = SparseEmbedding("rows", 4, optimizer="adagrad", learning_rate=0.05, scale=1.0)
        self.left, self.right = nn.Linear(FEATURES, 4), nn.Linear(4, 4)
        self.scale = Scale()
        self.delay = nn.Linear(4, 1)

    def forward(self, dense, sparse):
        right = self.right(self.rows(sparse).sum(1))
        left = nn.functional.normalize(self.left(dense), dim=1)
        return {
            "right": nn.functional.normalize(right, dim=1),
            "left": left,
            "scale": self.scale(),
            "delay": self.delay(left).squeeze(1),
        }


def batches(sizes):
    random = np.random.default_rng(1)
    return [
        Batch(
            {
                "dense": random.normal(size=(size, FEATURES)).astype(np.float32),
                "sparse": random.integers(0, KEYS, (size, 2)),
                "label.delay": random.normal(size=size).astype(np.float32),
                "label.weight": random.uniform(0, 2, size).astype(np.float32),
            }
        )
        for size in sizes
    ]


@pytest.fixture
def job_of(tmp_path):
    def make(code=OWN, staleness=0, **train):
        sys.modules.pop("losses", None)
        (tmp_path / "losses.py").write_text(code)
        job = JobSpec(directory=str(tmp_path))
        job.model.loss, job.data.weight = "losses.py:total", "weight"
        job.data.labels.extend(["delay"])
        job.train.optimizer.name, job.train.optimizer.learning_rate = "adam", 0.02
        job.train.staleness = staleness
        for key, value in train.items():
            setattr(job.train, key, value)
        return job

    return make


def plain_loss(outputs, batch):
    own, delay = torch.arange(len(batch["delay"])), outputs["delay"] - batch["delay"]
    logits = outputs["scale"] * outputs["left"] @ outputs["right"].T
    cross, late = nn.functional.cross_entropy, batch["delay"] > 0
    weighted = (batch["weight"] * delay.square()).sum() / batch["weight"].sum()
    mean = delay[late].abs().mean() if late.any() else 0.0
    return (cross(logits, own) + cross(logits.T, own)) / 2 + weighted + mean


def tensors(batch):
    return {name.removeprefix("label."): torch.from_numpy(a) for name, a in batch.arrays.items()}


def plain(job, steps, after=lambda step, dense, rows: False):
    """What one process of plain PyTorch comes to."""
    model = Pairs()
    table = LocalTable.create(model.rows.spec.table, **model.rows.spec.table_options())
    rows = torch.from_numpy(table.pull(np.arange(KEYS, dtype=np.uint64), True))
    model.rows = reference.Given()

    def forward(model, batch):
        batch = tensors(batch)
        outputs = model(batch["dense"], batch["sparse"])
        return plain_loss(outputs, batch), None, set(batch["sparse"].ravel().tolist())

    table = reference.Table(rows, "adagrad", 0.05, 0.0)
    return reference.train(model, {"rows": table}, forward, job, steps, after)


def check(job, plan, steps, tolerance=2e-5):
    cuts, widths, micro_batches = plan
    expected = plain(job, steps)
    pipeline = Pipeline(job, Pairs, cuts, widths, steps, micro_batches)
    if job.train.split_experts:
        samples = [len(batch) for batch in steps]
        pipeline._schedule = Schedule(
            len(steps), samples.__getitem__, micro_batches, lockstep=widths
        )
    workers = pipeline.run()
    for worker in workers[-1]:
        assert worker.executor.progress.losses == pytest.approx(expected.losses, rel=1e-5)
    state = expected.model.state_dict()
    for worker in chain(*workers):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=tolerance, atol=tolerance)
    rows = pipeline.client.tables["3.job.rows"].pull(np.arange(KEYS, dtype=np.uint64), True)
    torch.testing.assert_close(
        torch.from_numpy(rows), expected.tables["rows"].values(), rtol=tolerance, atol=tolerance
    )


def test_losses_and_weights_of_32_steps_are_those_of_plain_pytorch(job_of):
    check(job_of(clip=0.5), PLANS[2], batches((24, 24, 24, 7, 24, 24, 24, 1) * 4), 2e-4)


@pytest.mark.parametrize(("plan", "staleness"), [*zip(PLANS, (0, 1, 2, 1), strict=True)])
def test_any_plan_trains_as_plain_pytorch(job_of, plan, staleness):
    check(job_of(staleness=staleness), plan, batches((24, 7, 24, 1, 24)), 1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_plan_trains_as_plain_pytorch_at_any_staleness(job_of, plan, staleness):
    steps = batches((24, 24, 24, 7, 24, 24, 24, 1) * 4)
    check(job_of(staleness=staleness, clip=0.5), plan, steps, 2e-4)


def test_the_gradient_of_three_workers_with_four_micro_batches_each(job_of):
    job = job_of()
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 1.0
    steps = batches((50,))
    model = plain(job, steps).model
    first = Pairs().state_dict()
    expected = {name: first[name] - value for name, value in model.state_dict().items()}
    for cuts, widths in [([LAST], [3]), ([1, LAST], [2, 3])]:
        for worker in chain(*Pipeline(job, Pairs, cuts, widths, steps, 12).run()):
            for name, value in worker.module.state_dict().items():
                got = first[name] - value
                torch.testing.assert_close(got, expected[name], rtol=1e-5, atol=1e-6)


def test_what_is_computed_for_others_sake_is_no_negative(job_of):
    job = job_of(split_experts=True)
    check(job, ([1, LAST], [2, 3], 5), batches((8, 3, 8, 2)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_scales_the_loss_once(job_of, precision):
    steps = batches((24,)) * 6
    jobs = job_of(), job_of(precision=precision)
    for job in jobs:  # whose steps are as long as their gradients
        job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 0.3
    losses = plain(jobs[0], steps).losses
    assert losses[-1] < 0.9 * losses[0]
    workers = Pipeline(jobs[1], Pairs, [1, LAST], [2, 3], steps, 4).run()
    for worker in workers[-1]:
        assert worker.executor.progress.losses == pytest.approx(losses, rel=0.03)


@pytest.mark.parametrize(("staleness", "micro_batches"), [(0, 7), (1, 2), (2, 7)])
def test_a_loss_that_is_not_finite_ends_the_training_on_all_workers(
    job_of, staleness, micro_batches
):
    steps = batches((24,) * 5)
    steps[2]["dense"][5, 0] = np.inf
    job = job_of(staleness=staleness)
    workers = Pipeline(job, Pairs, [1, LAST], [2, 3], steps, micro_batches).run()
    for worker in chain(*workers):
        assert "step 2" in worker.diverged
        assert worker.executor.progress.step == 2


DRAWS = """
import torch
import heterps

@heterps.loss(over="batch")
def total(outputs, batch):
    others = torch.randperm(len(batch["delay"]))
    return (outputs["left"] * outputs["right"][others]).sum(1)
"""


def test_what_a_loss_draws_is_the_same_on_any_plan(job_of, monkeypatch):
    compute, alone = WholeLoss.compute, threading.Lock()

    def one_by_one(*args):
        with alone:  # workers are threads here, of which each seeds the generator that all have
            return compute(*args)

    monkeypatch.setattr(WholeLoss, "compute", one_by_one)
    found = [
        Pipeline(job_of(DRAWS), Pairs, cuts, widths, batches((24, 7, 24)), 5).run()[-1]
        for cuts, widths in [([LAST], [1]), ([1, LAST], [2, 3])]
    ]
    first, *others = (worker.executor.progress.losses for worker in chain(*found))
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-5)
    assert len(set(first)) == 3


class Skewed(Pairs):
    """Its temperature is that of its samples."""

    def forward(self, dense, sparse):
        outputs = super().forward(dense, sparse)
        return {**outputs, "scale": outputs["scale"] * dense.square().mean()}


class Prototypes(Pairs):
    """One of its outputs has rows that are no samples."""

    def forward(self, dense, sparse):
        outputs = super().forward(dense, sparse)
        return {**outputs, "protos": outputs["left"].T}


@pytest.mark.parametrize(
    ("build", "expected"),
    [(Skewed, r"'scale' \[\], another one for each"), (Prototypes, r"'protos' \[4, 6\] for 6")],
)
def test_an_output_that_does_not_go_with_the_samples_is_named(job_of, build, expected):
    with pytest.raises(ObjectiveError, match=expected):
        Pipeline(job_of(), build, [LAST], [2], batches((24,)), 4).run()


def of_heads(weight):
    job = JobSpec()
    job.data.labels.extend(["delay", "item", "seen"])
    job.data.weight = weight
    job.train.optimizer.name, job.train.optimizer.learning_rate = "adam", 0.02
    heads = job.train.heads
    heads["find"].CopyFrom(
        HeadSpec(
            loss="in_batch_softmax",
            of=["left", "right", "scale"],
            label="item",
            frequency="seen",
            weight=0.7,
        )
    )
    heads["match"].CopyFrom(HeadSpec(loss="contrastive", of=["right", "left"]))
    heads["rank"].CopyFrom(HeadSpec(loss="pairwise", of=["delay"], label="delay", group="item"))
    heads["delay"].CopyFrom(HeadSpec(loss="mse"))
    return job


def plain_heads(outputs, batch, weighted):
    f, n = nn.functional, len(batch["delay"])
    own, w = torch.arange(n), batch["weight"] if weighted else torch.ones(n)
    logits = outputs["scale"] * outputs["left"] @ outputs["right"].T - batch["seen"].log()
    same = batch["item"][:, None] == batch["item"]
    find = f.cross_entropy(
        logits.masked_fill(same & ~torch.eye(n, dtype=bool), -np.inf), own, reduction="none"
    )
    cosines = outputs["left"] @ outputs["right"].T
    match = f.cross_entropy(cosines, own, reduction="none")
    match = (match + f.cross_entropy(cosines.T, own, reduction="none")) / 2
    delay = (outputs["delay"] - batch["delay"]).square()
    total = every = 0.0
    for i in range(n):
        for j in range(n):
            if same[i, j] and batch["delay"][i] > batch["delay"][j]:
                apart = outputs["delay"][j] - outputs["delay"][i]
                total, every = total + w[i] * w[j] * f.softplus(apart), every + w[i] * w[j]
    rank = total / every if every else 0.0
    return (w * (0.7 * find + match + delay)).sum() / w.sum() + rank


@pytest.mark.parametrize("weight", ["", "weight"])
def test_built_in_ones_beside_another_are_those_of_plain_pytorch(monkeypatch, weight):
    def loss(outputs, batch):
        return plain_heads(outputs, batch, weight)

    monkeypatch.setattr(sys.modules[__name__], "plain_loss", loss)
    steps = batches((24, 24, 7, 1))
    generator = np.random.default_rng(2)
    for batch in steps:
        item = generator.integers(0, 5, len(batch))
        batch.arrays["label.item"] = item.astype(np.int32)
        batch.arrays["label.seen"] = (1 + item).astype(np.float32)
    for plan in PLANS[1:3]:
        check(of_heads(weight), plan, steps)


class Two(Pairs):
    """What it gives is what a contrastive loss reads."""

    def forward(self, dense, sparse):
        outputs = super().forward(dense, sparse)
        return {name: outputs[name] for name in ("left", "right", "scale")}


class Scored(Pairs):
    def forward(self, dense, sparse):
        return super().forward(dense, sparse)["delay"]


@pytest.mark.parametrize(
    ("build", "loss", "label"),
    [(Two, "contrastive", ""), (Two, "in_batch_softmax", "item"), (Scored, "pairwise", "delay")],
)
def test_a_built_in_one_alone_is_that_of_one_process(build, loss, label):
    job = JobSpec()
    job.train.loss = loss
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 0.1
    job.data.labels.extend([label] if label else [])
    (batch,) = batches((24,))
    batch.arrays["label.item"] = np.arange(24, dtype=np.int32) // 3
    outputs = build()(*(torch.from_numpy(batch[name]) for name in ("dense", "sparse")))
    expected = total(job_loss(job).of_batch(outputs, tensors(batch))).item()
    assert expected > 0.1
    for worker in Pipeline(job, build, [1, LAST], [2, 3], [batch] * 2, 5).run()[-1]:
        losses = worker.executor.progress.losses
        assert losses[0] == pytest.approx(expected, rel=1e-5)
        assert losses[1] < losses[0]


METRICS = """
def recall(outputs, batch):
    logits = outputs["scale"] * outputs["left"] @ outputs["right"].T
    return (logits.argmax(1) == __import__("torch").arange(len(logits))).double().mean()
"""


@pytest.mark.parametrize(("cuts", "widths"), [([LAST], [1]), ([1, LAST], [2, 3])])
def test_metrics_are_those_of_one_process(job_of, tmp_path, monkeypatch, cuts, widths):
    sys.modules.pop("metrics", None)
    (tmp_path / "metrics.py").write_text(METRICS)
    job, steps, found = job_of(), batches((24, 7)), []
    job.model.metrics.append("metrics.py:recall")
    (samples,) = batches((20,))
    parts = [
        {n: torch.from_numpy(a) for n, a in samples.slice(8 * n, 8 * n + 8).arrays.items()}
        for n in range(3)
    ]

    def given(job, split, size, rank, workers, stopped):
        yield from ((number, parts[number]) for number in range(rank, 3, workers))

    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    Pipeline(job, Pairs, cuts, widths, steps, 4, between=measuring(job, found)).run()
    trained = plain(job, steps)
    model = trained.model
    model.rows.rows = trained.tables["rows"].values()

    def outputs_of(some):
        with torch.no_grad():
            return model(some["dense"], some["sparse"])

    batch = tensors(samples)
    outputs = outputs_of(batch)
    right = (outputs["left"] @ outputs["right"].T).argmax(1) == torch.arange(20)
    match = 0.0
    for part in parts:
        out, count = outputs_of(part), len(part["dense"])
        logits, own = out["scale"] * out["left"] @ out["right"].T, torch.arange(count)
        cross = nn.functional.cross_entropy
        match += (cross(logits, own) + cross(logits.T, own)).item() / 2 * count / 20
    (metrics,) = found
    assert metrics["valid_recall"] == right.double().mean().item()
    assert metrics["valid_loss_match"] == pytest.approx(match, rel=1e-4)


class Paused(Pipeline):
    """Workers that all are to wait, from their first step on."""

    made = ()

    def _made(self, place, graph):
        worker = super()._made(place, graph)
        self.made = (*self.made, worker)
        if place.stage == place.rank == 0:
            worker.executor.progress.pause_asked.set()
        return worker


@pytest.mark.parametrize(("staleness", "micro_batches"), [(1, 7), (2, 2)])
def test_all_workers_pause_though_some_have_begun_the_next_step(
    job_of, tmp_path, staleness, micro_batches
):
    job = job_of(staleness=staleness)
    plan = [1, LAST], [2, 3], batches((24,) * 40), micro_batches
    pipeline = Paused(job, Pairs, *plan, folder=tmp_path / "cuts")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(pipeline.run)
        until = time.monotonic() + 60  # only a hang reaches it
        while len(pipeline.made) < 5 or any(
            worker.executor.progress.phase != PAUSED for worker in pipeline.made
        ):
            assert time.monotonic() < until
            assert not run.done()
            time.sleep(0.01)
        pipeline._stop.set()
        for inbox in chain(*pipeline._inboxes):
            inbox.wake()
        with pytest.raises(Stopped):
            run.result(60)
    (step,) = {worker.executor.progress.step for worker in pipeline.made}
    assert step < 40


@pytest.mark.exhaustive
@pytest.mark.parametrize(("plan", "staleness"), [*zip(PLANS, (0, 1, 2, 1), strict=True)])
def test_validation_measures_it_as_plain_pytorch_does(
    job_of, tmp_path, monkeypatch, plan, staleness
):
    """Terms of whole batches by the samples of these, others by what they count in all."""
    cuts, widths, micro_batches = plan
    job, every, patience = job_of(staleness=staleness), 2, 2
    job.train.optimizer.learning_rate = 0.2
    job.train.validate.CopyFrom(
        ValidateSpec(every=f"{every} steps", metric="valid_loss", patience=patience)
    )
    held_out = batches((24, 24, 24, 5))[::-1]

    def given(job, split, size, rank, workers, stopped):
        for number in range(rank, len(held_out), workers):
            yield number, tensors_of(held_out[number])

    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    history, best = [], None

    def after(step, dense, rows):
        nonlocal best
        if step % every:
            return False
        model = Pairs()
        model.rows = reference.Given()
        model.rows.rows = rows["rows"]
        model.load_state_dict(dense)
        match, names = 0.0, ("delay", "weight")
        every_batch = [tensors(batch) for batch in held_out]
        with torch.no_grad():
            outputs = [model(one["dense"], one["sparse"]) for one in every_batch]
            for one in outputs:
                own = torch.arange(len(one["left"]))
                logits = one["scale"] * one["left"] @ one["right"].T
                pairs = (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
                match += float(pairs) * len(own) / sum(map(len, held_out))
        delay, weight = (torch.cat([one[name] for one in every_batch]) for name in names)
        wrong, late = torch.cat([one["delay"] for one in outputs]) - delay, delay > 0
        squared = (weight * wrong.square()).sum() / weight.sum()
        history.append(match + float(squared + wrong[late].abs().mean()))
        if best is None or history[-1] < best[0]:
            best = history[-1], step, dense, rows
        return len(history) >= best[1] // every + patience

    steps = batches((24,) * 40)
    plain(job, steps, after)
    assert best[1] < every * len(history) < 40, "one that shows something"
    pipeline = Pipeline(
        job, Pairs, cuts, widths, steps, micro_batches, folder=tmp_path / "cuts", restores=True
    )
    for worker in chain(*pipeline.run()):
        done = worker.executor.following.validations
        found = [one.metrics["valid_loss"] for one in done.done]
        assert found == pytest.approx(history, rel=1e-3)
        assert done.best.step == best[1]
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, best[2][name], rtol=1e-3, atol=1e-3)
