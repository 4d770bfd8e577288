"""Losses by name over any plan against plain PyTorch on whole batches."""

import sys
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from protos.job_pb2 import HeadSpec, JobSpec
from tests.workers.stage.in_process import Pipeline, measuring
from workers.data.columns.arrays import Batch
from workers.learning.objective import Objective, ObjectiveError
from workers.model.code.entry import ModelError
from workers.model.objective.curve import LossCurve
from workers.model.objective.loss import job_loss
from workers.model.objective.metrics import JobMetrics
from workers.stage.running import evaluation

SIZES, FEATURES = (24, 24, 7), 5
PLANS = [([3], [1], 1), ([3], [3], 5), ([1, 3], [2, 1], 4), ([0, 1, 3], [1, 2, 3], 7)]


class Heads(nn.Module):
    """Outputs of several layers, one of them an early one."""

    def __init__(self):
        super().__init__()
        self.bottom, self.delay = nn.Linear(FEATURES, 4), nn.Linear(4, 1)
        self.click, self.kind = nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, dense):
        x = self.bottom(dense).tanh()
        delay = self.delay(x)
        return {"click": self.click(x), "delay": delay.squeeze(1), "kind": self.kind(x)}


def build():
    torch.manual_seed(3)
    return Heads()


class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.click, self.delay, self.kind = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x):
        delay = self.delay(x).squeeze(1)
        return {"click": self.click(x), "delay": delay, "kind": self.kind(x)}


class OneEnd(nn.Module):
    """Its last layer gives all outputs, in a dict or as `how` says."""

    def __init__(self, how=dict):
        super().__init__()
        self.bottom, self.middle, self.end = nn.Linear(FEATURES, 4), nn.Tanh(), Ends()
        self.end.register_forward_hook(lambda module, args, given: how(given))

    def forward(self, dense):
        return self.end(self.middle(self.bottom(dense)))


def build_one_end(how=dict):
    torch.manual_seed(3)
    return OneEnd(how)


def batches(sizes=SIZES):
    random = np.random.default_rng(1)
    found = []
    for size in sizes:
        weight = random.uniform(0, 3, size).astype(np.float32)
        weight[: size // 3] = 0  # whole micro-batches of it
        found.append(
            Batch(
                {
                    "dense": random.normal(size=(size, FEATURES)).astype(np.float32),
                    "label.click": random.integers(0, 2, size).astype(np.float32),
                    "label.delay": random.normal(size=size).astype(np.float32),
                    "label.kind": random.integers(0, 3, size).astype(np.int32),
                    "label.weight": weight,
                }
            )
        )
    return found


def job_of(tmp_path=None, code="", **train):
    job = JobSpec()
    job.data.labels.extend(["click", "delay", "kind"])
    job.train.optimizer.name, job.train.optimizer.learning_rate = "adam", 0.03
    for key, value in train.items():
        setattr(job.train, key, value)
    if code:
        job.directory, job.model.loss = str(tmp_path), "losses.py:total"
        (tmp_path / "losses.py").write_text(code)
    else:
        job.train.heads["click"].CopyFrom(HeadSpec(loss="bce_with_logits"))
        job.train.heads["delay"].CopyFrom(HeadSpec(loss="huber", weight=0.3))
        job.train.heads["kind"].CopyFrom(HeadSpec(loss="cross_entropy"))
    return job


def tensors(batch):
    found = {n.removeprefix("label."): torch.from_numpy(a) for n, a in batch.arrays.items()}
    return {**found, "kind": found["kind"].long()}


def plain(loss, steps, build=build):
    """What one process of plain PyTorch comes to: its model, and the terms of each step."""
    model, found = build(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for batch in map(tensors, steps):
        optimizer.zero_grad()
        terms = loss(model(batch["dense"]), batch)
        sum(terms.values()).backward()
        optimizer.step()
        found.append({name: term.item() for name, term in terms.items()})
    return model, found


def check_curve(curve, expected):
    """The losses of steps and each of their terms; 0 where a step has none of that name."""
    assert curve.losses == pytest.approx([sum(terms.values()) for terms in expected], rel=1e-5)
    assert curve.terms.keys() == {name for terms in expected for name in terms}
    for name, values in curve.terms.items():
        assert values == pytest.approx([e.get(name, 0) for e in expected], rel=1e-5, abs=1e-7)


def check(job, loss, plan, steps, build=build):
    model, expected = plain(loss, steps, build)
    cuts, widths, micro_batches = plan
    workers = Pipeline(job, build, cuts, widths, steps, micro_batches).run()
    state = model.state_dict()
    for worker in chain(*workers):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=2e-5, atol=2e-5)
    for worker in workers[-1]:
        check_curve(worker.executor.progress.curve, expected)


def heads(outputs, batch, weighted=False):
    f, w = nn.functional, batch["weight"]
    each = {
        "click": f.binary_cross_entropy_with_logits(
            outputs["click"].squeeze(1), batch["click"], reduction="none"
        ),
        "delay": 0.3 * f.huber_loss(outputs["delay"], batch["delay"], reduction="none"),
        "kind": f.cross_entropy(outputs["kind"], batch["kind"], reduction="none"),
    }
    return {n: (w * e).sum() / w.sum() if weighted else e.mean() for n, e in each.items()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("weighted", [False, True])
def test_several_heads_train_as_plain_pytorch(plan, weighted):
    job = job_of()
    job.data.weight = "w" if weighted else ""
    check(job, lambda o, b: heads(o, b, weighted), plan, batches())


@pytest.mark.parametrize("plan", [([2], [1], 1), ([2], [3], 5), ([0, 2], [2, 3], 4)])
def test_outputs_may_be_a_dict_that_the_last_layer_gives(plan):
    check(job_of(), heads, plan, batches(), build_one_end)


def test_a_last_layer_that_gives_anything_else_is_named():
    pipeline = Pipeline(job_of(), lambda: build_one_end(tuple), [2], [1], batches(), 1)
    with pytest.raises(ModelError, match="returns what 'end' gives, a tuple; expected a tensor"):
        pipeline.run()


OWN = """
import torch
from torch.nn import functional as f
import heterps

def some(batch):
    return (batch["delay"] > 0.5).sum()

@heterps.loss(over={"late": some, "heavy": "weights"})
def total(outputs, batch):
    late = batch["delay"] > 0.5
    return {
        "late": f.mse_loss(outputs["delay"][late], batch["delay"][late]),
        "heavy": f.cross_entropy(outputs["kind"], batch["kind"], reduction="none"),
        "click": f.binary_cross_entropy_with_logits(outputs["click"].squeeze(1), batch["click"]),
    }
"""


def own(outputs, batch):
    f, w, late = nn.functional, batch["weight"], batch["delay"] > 0.5
    kind = f.cross_entropy(outputs["kind"], batch["kind"], reduction="none")
    return {
        "late": f.mse_loss(outputs["delay"][late], batch["delay"][late]),
        "heavy": (w * kind).sum() / w.sum(),
        "click": f.binary_cross_entropy_with_logits(outputs["click"].squeeze(1), batch["click"]),
    }


def test_a_head_without_weight_is_measured_and_not_learned():
    job = job_of()
    job.train.heads["kind"].weight = 0.0
    (batch,) = map(tensors, batches((8,)))
    outputs = build()(batch["dense"])
    without = job_of()
    del without.train.heads["kind"]
    expected = job_loss(without).part(outputs, batch, 1.0, [], [])
    assert float(job_loss(job).part(outputs, batch, 1.0, [], [])) == float(expected)
    job.train.heads["kind"].ClearField("weight")
    assert float(job_loss(job).part(outputs, batch, 1.0, [], [])) > float(expected)


def test_what_terms_count_has_one_order_in_all_processes():
    """A stage reads what another one has counted; maps of a message have an order of their own."""
    (batch,) = map(tensors, batches((24,)))
    late, kinds = (lambda b: (b["delay"] > 0.5).sum()), (lambda b: (b["kind"] > 0).sum())

    def terms(outputs, labels):
        some, one = labels["delay"] > 0.5, labels["kind"] > 0
        each = (outputs["delay"] - labels["delay"]).square()
        return {"late": each[some].mean(), "kinds": each[one].mean()}

    first = Objective(terms, {"": "samples", "late": late, "kinds": kinds})
    last = Objective(terms, {"kinds": kinds, "late": late, "": "samples"})
    outputs, counts = build()(batch["dense"]), first.counts(batch)
    assert counts == last.counts(batch)
    assert counts[0] != counts[1]
    expected = terms(outputs, batch)
    for name, part in last.parts(outputs, batch, 1.0, counts, counts).items():
        torch.testing.assert_close(part, expected[name])


@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_of_the_jobs_own_adds_up_by_what_it_counts(tmp_path, plan):
    job = job_of(tmp_path, OWN)
    job.data.weight = "w"
    steps = batches()
    # In the last micro-batches of the smallest batch nothing is late: a mean over nothing.
    steps[2]["label.delay"][3:] = -1.0
    steps[2]["label.delay"][0] = 2.0
    check(job, own, plan, steps)


SOME = """
import heterps

def late(batch):
    return (batch["delay"] > 0.5).sum()

@heterps.loss(over={"late": late})
def total(outputs, batch):
    some = batch["delay"] > 0.5
    found = {"all": (outputs["delay"] - batch["delay"]).square()}
    if some.any():
        found["late"] = (outputs["delay"] - batch["delay"])[some].abs().mean()
    return found
"""


def some(outputs, batch):
    late, error = batch["delay"] > 0.5, outputs["delay"] - batch["delay"]
    found = {"all": error.square().mean()}
    return {**found, "late": error[late].abs().mean()} if late.any() else found


def with_a_late_term(seed, count):
    """Batches of which only some, and of these one or two samples, have the term."""
    steps = batches((19,) * count)
    random = np.random.default_rng(seed)
    for number, step in enumerate(steps):
        step["label.delay"][:] = -random.uniform(0, 1, 19).astype(np.float32)
        if number >= 2 and number % 3 < 2:
            step["label.delay"][random.integers(0, 19, 2)] = 2.0
    return steps


@pytest.mark.parametrize("plan", PLANS)
def test_a_term_that_few_batches_have_is_summed_from_its_first_one_on(tmp_path, plan):
    check(job_of(tmp_path, SOME), some, plan, with_a_late_term(3, 9))


@pytest.mark.parametrize("plan", PLANS[1:])
def test_terms_do_not_depend_on_the_plan_where_steps_overlap(tmp_path, plan):
    found = []
    for cuts, widths, micro_batches in (PLANS[0], plan):
        job, steps = job_of(tmp_path, SOME, staleness=2), with_a_late_term(4, 12)
        for worker in Pipeline(job, build, cuts, widths, steps, micro_batches).run()[-1]:
            found.append(worker.executor.progress.curve)
    for curve in found:
        assert curve.losses == pytest.approx(found[0].losses, rel=1e-5)
        assert curve.terms["late"] == pytest.approx(found[0].terms["late"], rel=1e-5, abs=1e-7)
        sums = [sum(values) for values in zip(*curve.terms.values(), strict=True)]
        assert curve.losses == pytest.approx(sums, rel=1e-6)


def test_terms_go_on_from_a_cut(tmp_path):
    job, steps = job_of(tmp_path, SOME), with_a_late_term(5, 9)
    job.train.checkpoint.every, job.train.checkpoint.keep = "1 steps", 100
    Pipeline(job, build, [3], [2], steps, 3, folder=tmp_path / "cuts").run()
    _, expected = plain(some, steps)
    there = sorted(int(one.name) for one in (tmp_path / "cuts").iterdir() if one.name.isdecimal())
    for step in {there[0], there[-1]}:  # before the first step that has the term, and after it
        resumed = {"folder": tmp_path / "cuts", "resume": f"{tmp_path}/cuts/{step}", "attempt": 2}
        workers = Pipeline(job, build, [1, 3], [2, 3], steps, 4, **resumed).run()
        assert [worker.executor.progress.losses for worker in workers[0]] == [[], []]
        for worker in workers[-1]:
            check_curve(worker.executor.progress.curve, expected)


def test_the_losses_that_are_saved_have_a_column_for_each_term():
    curve = LossCurve()
    curve.add(1.5, {})
    curve.add(3.25, {"late, or not": 3.0, "click": 0.25})
    assert curve.as_csv().splitlines() == [
        'step,loss,loss_click,"loss_late, or not"',
        "1,1.5,0,0",
        "2,3.25,0.25,3",
    ]
    assert LossCurve.take(curve.tensors()) == curve
    assert curve.recent(1) == (3.25, {"click": 0.25, "late, or not": 3.0})


def test_a_head_that_the_model_does_not_have_is_named():
    job = job_of()
    job.train.heads["like"].CopyFrom(HeadSpec(loss="mse", label="click"))
    with pytest.raises(ObjectiveError, match=r"train\.heads\.like: the model gives click, delay"):
        Pipeline(job, build, [3], [1], batches(), 1).run()


METRICS = """
def first(outputs, batch):
    return {"kind": batch["kind"][0], "last": batch["kind"][-1], "delay": outputs["delay"][5]}

def both(outputs, batch):
    return ((outputs["click"].squeeze(1) > 0) == (batch["click"] > 0.5)).double().mean()

class Running:
    "Depends on the order of batches, and on where they end."
    def reset(self):
        self.value = 0.0

    def update(self, outputs, batch):
        self.value = 0.5 * self.value + (outputs["delay"] - batch["delay"]).abs().max()

    def compute(self):
        return {"now": self.value}

    def __call__(self, *given):
        raise AssertionError("it is no function")

running = Running()
"""


@pytest.mark.parametrize(
    ("build", "cuts", "widths"),
    [
        (build, [3], [1]),
        (build, [3], [3]),
        (build, [1, 3], [2, 2]),
        (build_one_end, [1, 2], [1, 2]),
    ],
)
@pytest.mark.parametrize("of_its_own", [False, True])
def test_metrics_are_those_of_one_process(tmp_path, monkeypatch, build, cuts, widths, of_its_own):
    sys.modules.pop("metrics", None)
    (tmp_path / "metrics.py").write_text(METRICS)
    job = job_of(tmp_path, OWN if of_its_own else "")
    job.directory, job.data.weight = str(tmp_path), "w"
    names = ("first", "both", "Running", "running")
    job.model.metrics.extend(f"metrics.py:{name}" for name in names)
    (samples,) = batches((23,))
    steps, found = batches(), []

    def given(job, split, size, rank, workers, stopped):
        for number in range(rank, 6, workers):
            part = {
                n: torch.from_numpy(a)
                for n, a in samples.slice(4 * number, 4 * number + 4).arrays.items()
            }
            yield number, {**part, "label.kind": part["label.kind"].long()}

    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    Pipeline(job, build, cuts, widths, steps, 4, between=measuring(job, found)).run()
    model, _ = plain(own if of_its_own else lambda o, b: heads(o, b, True), steps, build)
    batch = tensors(samples)
    with torch.no_grad():
        outputs = model(batch["dense"])
    (metrics,) = found
    expected = {
        "valid_first_kind": float(batch["kind"][0]),
        "valid_first_last": float(batch["kind"][-1]),
        "valid_first_delay": float(outputs["delay"][5]),
        "valid_both": float(
            ((outputs["click"][:, 0] > 0) == (batch["click"] > 0.5)).double().mean()
        ),
    }
    now = 0.0
    for part in (slice(at, at + 4) for at in range(0, 23, 4)):
        now = 0.5 * now + (outputs["delay"] - batch["delay"])[part].abs().max().item()
    expected |= {"valid_Running_now": now, "valid_running_now": now}
    if of_its_own:
        expected["valid_loss"] = sum(own(outputs, batch).values()).item()
    else:
        weights = batch["weight"] / batch["weight"].sum()
        each = nn.functional.cross_entropy(outputs["kind"], batch["kind"], reduction="none")
        expected["valid_kind_cross_entropy"] = (weights * each).sum().item()
        right = outputs["kind"].argmax(1) == batch["kind"]
        expected["valid_kind_accuracy"] = (weights * right).sum().item()
        errors = (outputs["delay"] - batch["delay"]).abs()
        expected["valid_delay_mae"] = (weights * errors).sum().item()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


OBJECTS = """
from torchmetrics import MeanSquaredError
from torchmetrics.classification import BinaryAUROC, BinaryCalibrationError

auroc = BinaryAUROC()
calibration = BinaryCalibrationError(n_bins=5, norm="l1")
mse = MeanSquaredError()
"""


def test_metrics_of_torchmetrics_are_those_of_one_update(tmp_path):
    """Of probabilities, also where all logits of a batch could be some."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    sys.modules.pop("objects", None)
    (tmp_path / "objects.py").write_text(OBJECTS)
    job = JobSpec(directory=str(tmp_path))
    job.model.metrics.extend(["objects.py:auroc", "objects.py:calibration"])
    random = torch.Generator().manual_seed(4)
    logits, labels = torch.rand(24, generator=random), torch.arange(24) % 2
    metrics = JobMetrics(job)
    parts = [
        metrics.take(logits[some], {"label": labels[some].float()})
        for some in (slice(0, 8), slice(8, 24))
    ]
    found = metrics.measure({n: torch.cat([p[n] for p in parts]) for n in parts[0]}, "valid")
    of = torchmetrics.functional.classification
    scores = logits.sigmoid()
    expected = of.binary_calibration_error(scores, labels, n_bins=5, norm="l1")
    assert found["valid_calibration"] == pytest.approx(expected.item(), rel=1e-6)
    assert found["valid_auroc"] == pytest.approx(of.binary_auroc(scores, labels).item(), rel=1e-6)
    assert found["valid_auroc"] == pytest.approx(found["valid_auc"], rel=1e-6)


def test_a_label_that_is_not_there_is_named(tmp_path):
    code = "def total(outputs, batch):\n    return (outputs['delay'] - batch['delays']).abs()\n"
    said = "label 'delays': got click, delay, kind, weight; expected it among data.labels"
    with pytest.raises(ObjectiveError, match=said):
        Pipeline(job_of(tmp_path, code), build, [3], [2], batches(), 2).run()
