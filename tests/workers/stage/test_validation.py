"""Validation in training against plain PyTorch that stops early, over any plan; what it changes."""

import json
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn

from protos.job_pb2 import JobSpec, ValidateSpec
from tests.workers.stage import reference
from tests.workers.stage.in_process import TABLES, Pipeline
from tests.workers.stage.test_cuts import assert_equal, results
from tests.workers.stage.test_equality import KEYS, wide
from workers.errors import BestLostError
from workers.model.cut import Validated, read_cut
from workers.model.entry import ModelError
from workers.stage import evaluation
from workers.stage.cuts import DenseFiles
from workers.stage.restoring import restore_best
from workers.stage.validation import Aim, Validations

STEPS = 14


@pytest.fixture
def held_out(monkeypatch):
    """Keys int64 [40, 2] and labels of the validation data, in eight batches of different sizes."""
    random = np.random.default_rng(4)
    # Each pair once: equal scores may differ by a rounding.
    pairs = random.permutation(KEYS**2)[:40]
    keys = torch.from_numpy(np.stack([pairs // KEYS, pairs % KEYS], 1))
    labels = torch.from_numpy(random.integers(0, 2, 40).astype(np.float32))
    edges = [0, 7, 9, 14, 20, 24, 31, 39, 40]

    def given(job, split, size, rank, workers, stopped):
        assert split == "valid"
        for number in range(rank, 8, workers):
            part = slice(edges[number], edges[number + 1])
            yield number, {"sparse": keys[part], "label.label": labels[part]}

    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    return keys, labels


def validated(case, every, metric, patience):
    case.job.train.validate.CopyFrom(
        ValidateSpec(every=every, metric=metric, patience=patience)
    )
    return case


def auc(scores, labels):
    """By all pairs."""
    pairs = [
        float(a > b) + 0.5 * float(a == b) for a in scores[labels == 1] for b in scores[labels == 0]
    ]
    return sum(pairs) / len(pairs)


class Plain:
    """Plain PyTorch that measures held-out data every few steps and ends by patience."""

    def __init__(self, case, every, patience, metric, held_out, steps=STEPS):
        self.case, self.every, self.patience, self.metric = case, every, patience, metric
        self.keys, self.labels = held_out
        self.steps, self.best, self.bad, self.history, self.stopped = steps, None, 0, [], steps
        case.reference(self.after)

    def after(self, step, dense, rows):
        if step % self.every and step != self.steps:
            return False
        model = self.case.model()
        model.first, model.second = reference.Given(), reference.Given()
        model.first.rows, model.second.rows = rows["first"], rows["second"]
        model.load_state_dict(dense)
        with torch.no_grad():
            scores = model.eval()(self.keys).reshape(-1)
        found = {
            "valid_auc": auc(scores, self.labels),
            "valid_logloss": nn.functional.binary_cross_entropy_with_logits(
                scores, self.labels
            ).item(),
        }
        self.history.append((step, found))
        value = found[self.metric] * (1 if self.metric == "valid_auc" else -1)
        if self.best is None or value > self.best[0]:
            self.best, self.bad = (value, step, dense, rows), 0
        else:
            self.bad += 1
        if self.patience and self.bad >= self.patience:
            self.stopped = step
            return True
        return False

    def check(self, pipeline, workers, tolerance=1e-4):
        _, best, dense, rows = self.best
        seen = set()
        for worker in chain(*workers):
            done = worker.executor.following.validations
            assert [one.step for one in done.done] == [step for step, _ in self.history]
            for one, (_, expected) in zip(done.done, self.history, strict=True):
                assert one.metrics == pytest.approx(expected, abs=tolerance)
            assert done.best.step == best
            assert worker.executor.progress.step == self.stopped
            for name, value in worker.module.state_dict().items():
                torch.testing.assert_close(value, dense[name], rtol=tolerance, atol=tolerance)
                seen.add(name)
        assert seen == dense.keys()
        for name, table in (("first", "one"), ("second", "two")):
            found = pipeline.client.tables[TABLES + table].pull(np.arange(KEYS, dtype="u8"), True)
            torch.testing.assert_close(
                torch.from_numpy(found), rows[name], rtol=tolerance, atol=tolerance
            )


PLANS = {
    "alone": ((4,), (1,)),
    "several": ((4,), (3,)),
    "stages": ((0, 2, 4), (2, 3, 2)),
    "narrow": ((1, 4), (3, 1)),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_it_ends_when_plain_pytorch_does_and_has_the_same_best(tmp_path, held_out, plan, staleness):
    cuts, widths = PLANS[plan]
    clip = 0.3 if plan == "several" else 0.0
    case = replace(wide(staleness, cuts=cuts, widths=widths, clip=clip), sizes=(13,) * STEPS)
    validated(case, "2 steps", "valid_auc", 2)
    plain = Plain(case, 2, 2, "valid_auc", held_out)
    assert plain.best[1] < plain.stopped < STEPS, "one that shows something"
    pipeline = case.pipeline(folder=tmp_path, restores=True)
    plain.check(pipeline, pipeline.run())
    assert read_cut(f"{tmp_path}/{plain.best[1]}").validated[-1].step == plain.best[1]
