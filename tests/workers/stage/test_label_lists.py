"""Losses over labels that are lists, on any plan, against plain PyTorch on whole batches."""

from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as f

from protos.job_pb2 import HeadSpec, JobSpec, LabelListSpec
from tests.workers.stage.in_process import Pipeline
from workers.data.columns.arrays import Batch
from workers.learning.losses import sample_losses
from workers.model.objective.loss import job_loss
from workers.model.objective.metrics import JobMetrics

SIZES, FEATURES, TOPICS, LENGTH, CLASSES = (24, 24, 7), 5, 3, 4, 6
PLANS = [([2], [1], 1), ([2], [3], 5), ([0, 2], [2, 1], 4), ([0, 2], [1, 3], 7)]
NAN = float("nan")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Linear(FEATURES, 8)
        self.topics = nn.Linear(8, TOPICS)
        self.words = nn.Linear(8, LENGTH * (CLASSES + 1))

    def forward(self, dense):
        x = self.bottom(dense).tanh()
        words = self.words(x).view(-1, LENGTH, CLASSES + 1)
        return {"topics": self.topics(x), "tags": words[..., 1:], "rates": words[..., :1]}


def build():
    torch.manual_seed(3)
    return Net()


def batches():
    random, found = np.random.default_rng(1), []
    for size in SIZES:
        counts = random.integers(0, LENGTH + 1, (size, 1))
        counts[: size // 3] = 0  # micro-batches of which nothing counts
        there = np.arange(LENGTH) < counts
        topics = random.integers(0, 2, (size, TOPICS)).astype(np.float32)
        topics[random.random(topics.shape) < 0.2] = NAN
        tags = np.where(there, random.integers(0, CLASSES, there.shape), -1).astype(np.int32)
        rates = np.where(there, random.normal(size=there.shape), NAN).astype(np.float32)
        weight = random.uniform(0, 3, size).astype(np.float32)
        dense = random.normal(size=(size, FEATURES)).astype(np.float32)
        labels = {"topics": topics, "tags": tags, "rates": rates, "weight": weight}
        named = {f"label.{name}": values for name, values in labels.items()}
        found.append(Batch({"dense": dense, **named}))
    return found


def job_of(weighted=False):
    job = JobSpec()
    job.data.labels.extend(["topics", "tags", "rates"])
    job.data.weight = "w" if weighted else ""
    job.data.label_lists["topics"].CopyFrom(LabelListSpec(shape=[TOPICS], missing="skip"))
    for name in ("tags", "rates"):
        job.data.label_lists[name].length = LENGTH
    job.train.optimizer.name, job.train.optimizer.learning_rate = "adam", 0.03
    job.train.heads["topics"].CopyFrom(HeadSpec(loss="bce_with_logits"))
    job.train.heads["tags"].CopyFrom(HeadSpec(loss="cross_entropy", weight=0.5))
    job.train.heads["rates"].CopyFrom(HeadSpec(loss="huber"))
    return job


def tensors(batch):
    found = {n.removeprefix("label."): torch.from_numpy(a) for n, a in batch.arrays.items()}
    return {**found, "tags": found["tags"].long()}


def counted(batch, name):
    """Where a label counts, and each such place's weight."""
    label = batch[name]
    there = label >= 0 if name == "tags" else ~label.isnan()
    return there, batch["weight"].unsqueeze(1).expand(label.shape)[there]


def terms(outputs, batch, weighted):
    found = {}
    for name, factor in (("topics", 1), ("tags", 0.5), ("rates", 1)):
        there, weights = counted(batch, name)
        out, label = outputs[name], batch[name][there]
        if name == "topics":
            each = f.binary_cross_entropy_with_logits(out[there], label, reduction="none")
        elif name == "tags":
            each = f.cross_entropy(out[there], label, reduction="none")
        else:
            each = f.huber_loss(out.squeeze(2)[there], label, reduction="none")
        mean = (each * weights).sum() / weights.sum() if weighted else each.mean()
        found[name] = factor * mean
    return found


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("weighted", [False, True])
def test_means_are_over_the_values_that_count(plan, weighted):
    steps, (cuts, widths, micro_batches) = batches(), plan
    model, expected = build(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for batch in map(tensors, steps):
        optimizer.zero_grad()
        several = terms(model(batch["dense"]), batch, weighted)
        sum(several.values()).backward()
        optimizer.step()
        expected.append({name: term.item() for name, term in several.items()})
    workers = Pipeline(job_of(weighted), build, cuts, widths, steps, micro_batches).run()
    state = model.state_dict()
    for worker in chain(*workers):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=2e-5, atol=2e-5)
    for worker in workers[-1]:
        curve = worker.executor.progress.curve
        for name, values in curve.terms.items():
            assert values == pytest.approx([one[name] for one in expected], rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_over_the_values_that_count(weighted):
    metrics, taken, model = JobMetrics(job_of(weighted)), [], build()
    steps = [tensors(batch) for batch in batches()]
    with torch.no_grad():
        taken = [metrics.take(model(batch["dense"]), batch) for batch in steps]
    found = metrics.measure({n: torch.cat([t[n] for t in taken]) for n in taken[0]}, "valid")
    whole = {name: torch.cat([batch[name] for batch in steps]) for name in steps[0]}
    with torch.no_grad():
        out = model(whole["dense"])
        losses = terms(out, whole, weighted)
    assert found["valid_topics_logloss"] == pytest.approx(losses["topics"].item(), rel=1e-5)
    assert found["valid_tags_cross_entropy"] == pytest.approx(2 * losses["tags"].item(), rel=1e-5)
    there, weights = counted(whole, "rates")
    errors = (out["rates"].squeeze(2) - whole["rates"])[there].abs()
    weights = weights if weighted else torch.ones_like(weights)
    assert found["valid_rates_mae"] == pytest.approx(
        float((errors * weights).sum() / weights.sum())
    )
    there, weights = counted(whole, "tags")
    weights = weights if weighted else torch.ones_like(weights)
    right = (out["tags"].argmax(2) == whole["tags"])[there] * weights
    assert found["valid_tags_accuracy"] == pytest.approx(float(right.sum() / weights.sum()))
    areas = []
    for topic in range(TOPICS):
        label, score = whole["topics"][:, topic], out["topics"][:, topic]
        weight = whole["weight"] if weighted else torch.ones_like(label)
        pairs = won = 0.0
        for i in (label == 1).nonzero().flatten():
            for j in (label == 0).nonzero().flatten():
                pair = float(weight[i] * weight[j])
                pairs += pair
                won += pair * (float(score[i] > score[j]) + float(score[i] == score[j]) / 2)
        areas.append(won / pairs)
    assert found["valid_topics_auc"] == pytest.approx(np.mean(areas), rel=1e-5)


def test_what_does_not_count_has_no_gradient_though_it_is_not_finite():
    out = torch.tensor([[NAN, 2.0], [float("inf"), 1.0]], requires_grad=True)
    labels = torch.tensor([[NAN, 1.0], [NAN, NAN]])
    losses = sample_losses("mse", out, labels)
    assert losses.tolist() == [1.0, 0.0]
    losses.sum().backward()
    assert out.grad.tolist() == [[0.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", ["bce_with_logits", "cross_entropy"])
def test_predictions_of_another_shape_are_refused(name):
    labels = torch.zeros(3, 2, dtype=torch.long if name == "cross_entropy" else torch.float)
    with pytest.raises(ValueError, match=r"predictions \[2, 3.*\] for labels \[3, 2\]"):
        sample_losses(name, torch.zeros(2, 3, *[4] * (name == "cross_entropy")), labels)


def test_a_batch_of_which_nothing_counts_adds_nothing():
    batch = {name: values[:2] for name, values in tensors(batches()[0]).items()}
    assert not counted(batch, "tags")[0].any()
    objective, outputs = job_loss(job_of()), build()(batch["dense"])
    found = objective.of_batch(outputs, batch)
    assert (found["tags"].item(), found["rates"].item()) == (0.0, 0.0)
    sum(found.values()).backward()
