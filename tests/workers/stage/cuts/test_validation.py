"""Validation in training against plain PyTorch that stops early, over any plan; what it changes."""

import shutil
import time
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from chassis.aim import Aim
from protos.job_pb2 import JobSpec, ValidateSpec
from tests.workers.stage import reference
from tests.workers.stage.cuts.test_cuts import assert_equal, results
from tests.workers.stage.in_process import TABLES, Pipeline, Tables
from tests.workers.stage.test_equality import KEYS, wide
from workers.data.columns.arrays import Batch
from workers.errors import BestLostError
from workers.model.code.entry import ModelError
from workers.model.saved.cut import CutError, Validated, read_cut
from workers.stage.cuts.validation import Validations
from workers.stage.report import busy, progress
from workers.stage.running import evaluation, executor
from workers.stage.running.layers import StageLayers

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
    case.job.train.validate.CopyFrom(ValidateSpec(every=every, metric=metric, patience=patience))
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


class Late(Tables):
    """Tables whose commits take their time."""

    def commit_async(self, *args, **kwargs):
        time.sleep(0.02)
        return super().commit_async(*args, **kwargs)


def check(folder, held_out, plan, staleness):
    cuts, widths = PLANS[plan]
    clip = 0.3 if plan == "several" else 0.0
    case = replace(wide(staleness, cuts=cuts, widths=widths, clip=clip), sizes=(13,) * STEPS)
    validated(case, "2 steps", "valid_auc", 2)
    plain = Plain(case, 2, 2, "valid_auc", held_out)
    assert plain.best[1] < plain.stopped < STEPS, "one that shows something"
    pipeline = case.pipeline(client=Late(), folder=folder, restores=True)
    plain.check(pipeline, pipeline.run())
    assert read_cut(f"{folder}/{plain.best[1]}").validated[-1].step == plain.best[1]


@pytest.mark.parametrize(("plan", "staleness"), [("stages", 2), ("narrow", 1), ("several", 0)])
def test_it_ends_when_plain_pytorch_does_and_has_the_same_best(tmp_path, held_out, plan, staleness):
    check(tmp_path, held_out, plan, staleness)


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_it_does_so_on_any_plan(tmp_path, held_out, plan, staleness):
    check(tmp_path, held_out, plan, staleness)


class Slow(Late):
    """Pulls, too, take their time: many are under way when the training ends."""

    def pull_many(self, *args, **kwargs):
        time.sleep(0.02)
        return super().pull_many(*args, **kwargs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [1, 2])
def test_rows_of_steps_that_are_not_of_the_model_are_not_in_its_tables(
    tmp_path, held_out, staleness
):
    """Though they were pulled ahead: each step looks up keys that no other does."""
    case = replace(wide(staleness), sizes=(13,) * STEPS)
    validated(case, "2 steps", "valid_logloss", 2)
    pipeline = case.pipeline(client=Slow(), folder=tmp_path, restores=True)
    for number, batch in enumerate(pipeline._batches.steps):
        batch["sparse"][:5] += KEYS * (number + 1)
    workers = pipeline.run()
    done = workers[0][0].executor
    best, stopped = done.following.validations.best.step, done.progress.step
    assert best < stopped < STEPS, "one that shows something"
    seen = [batch["sparse"] for batch in pipeline._batches.steps[:best]]
    ahead = [batch["sparse"] for batch in pipeline._batches.steps[stopped:]]
    pulled = {key for kind, _, keys in pipeline.client.calls if kind == "pull" for key in keys}
    assert pulled & set(np.unique(ahead).tolist()) - set(range(KEYS))
    for table in ("one", "two"):
        found = np.sort(pipeline.client.tables[TABLES + table].keys())
        assert found.tolist() == np.unique(seen).tolist()


@pytest.fixture
def cut_everywhere(tmp_path, held_out):
    """A job without staleness, its plain reference, and the steps of the cuts that it has left."""
    case = replace(wide(), sizes=(13,) * STEPS)
    case.job.train.checkpoint.every, case.job.train.checkpoint.keep = "1 steps", 100
    validated(case, "2 steps", "valid_auc", 2)
    plain = Plain(case, 2, 2, "valid_auc", held_out)
    case.pipeline(folder=tmp_path / "before").run()
    found = (tmp_path / "before").iterdir()
    return case, plain, sorted(int(place.name) for place in found if place.name.isdecimal())


def goes_on(folder, case, plain, step):
    """From a cut under another plan."""
    moved = replace(case, cuts=(1, 4), widths=(1, 2), micro_batches=3)
    shutil.copytree(folder / "before", folder / "after")
    places = {"folder": folder / "after", "resume": f"{folder}/after/{step}"}
    pipeline = moved.pipeline(**places, attempt=2, restores=True)
    plain.check(pipeline, pipeline.run())


def test_a_training_that_goes_on_keeps_its_patience_and_its_best(tmp_path, cut_everywhere):
    case, plain, steps = cut_everywhere
    goes_on(tmp_path, case, plain, min(step for step in steps if step > plain.best[1]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ahead", range(5))
def test_it_does_so_from_any_cut(tmp_path, cut_everywhere, ahead):
    """Before the best, at it, and after it."""
    case, plain, steps = cut_everywhere
    goes_on(tmp_path, case, plain, steps[ahead % len(steps)])


def test_what_is_the_best_so_far_is_taken_from_the_job_before(tmp_path, cut_everywhere):
    case, plain, steps = cut_everywhere
    after = f"{tmp_path}/before/{min(step for step in steps if step > plain.best[1])}"
    case.job.train.resume.place = after
    pipeline = case.pipeline(folder=tmp_path / "own", resume=after, restores=True)
    plain.check(pipeline, pipeline.run())
    shutil.rmtree(tmp_path / "before" / str(plain.best[1]))
    with pytest.raises(CutError, match="no cut of the best validation"):
        case.pipeline(folder=tmp_path / "own", resume=after, restores=True).run()


FEATURES = 4


class Counting(nn.Module):
    """Counts its forwards, also those of a validation, and uses the count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x + 0.01 * self.count


class Net(nn.Module):
    """Without tables; what it does depends on its mode, on random numbers and on a buffer."""

    def __init__(self, alone):
        super().__init__()
        # The threads of a process draw from one generator.
        dropout = nn.Dropout(0.3) if alone else nn.Identity()
        self.first = nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), dropout)
        self.middle = Counting() if alone else nn.Tanh()
        self.last = nn.Linear(6, 1)

    def forward(self, dense):
        return self.last(self.middle(self.first(dense))).squeeze(1)


def build(alone):
    torch.manual_seed(5)
    return Net(alone)


def of_numbers(seed, sizes):
    random = np.random.default_rng(seed)
    return [
        Batch(
            {
                "dense": random.normal(size=(size, FEATURES)).astype(np.float32),
                "label.label": random.normal(size=size).astype(np.float32),
            }
        )
        for size in sizes
    ]


@pytest.fixture
def numbers(monkeypatch):
    """The validation data of models of numbers: their inputs and labels, and how it is read."""
    whole = of_numbers(9, [24])[0]
    inputs = torch.from_numpy(whole.arrays["dense"])
    labels = torch.from_numpy(whole.arrays["label.label"])

    def given(job, split, size, rank, workers, stopped):
        for number in range(rank, 4, workers):
            part = slice(number * 6, number * 6 + 6)
            yield number, {"dense": inputs[part], "label.label": labels[part]}

    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    return inputs, labels


def numbers_job(**train):
    job = JobSpec()
    job.train.loss = "mse"
    job.train.optimizer.name, job.train.optimizer.learning_rate = "adam", 0.05
    for key, value in train.items():
        setattr(job.train, key, value)
    return job


@pytest.mark.parametrize(
    ("cuts", "widths", "staleness"), [((2,), (1,), 2), ((0, 2), (1, 1), 1), ((2,), (2,), 0)]
)
def test_validation_changes_nothing(tmp_path, numbers, cuts, widths, staleness):
    """Neither statistics nor random numbers nor buffers; and seven validations did take place."""
    found = []
    alone = widths == (1,)
    for every in ("", "1 steps"):
        job = numbers_job(staleness=staleness, ema=0.9)
        job.train.validate.CopyFrom(ValidateSpec(every=every, metric="valid_mse"))
        steps = of_numbers(1, [16] * 6 + [5])
        folder = tmp_path / (every or "none")
        pipeline = Pipeline(job, lambda: build(alone), cuts, widths, steps, 2, folder=folder)
        workers = pipeline.run()
        state, losses = {}, workers[-1][0].executor.progress.losses
        for worker in chain(*workers):
            state |= {n: v.clone() for n, v in worker.module.state_dict().items()}
            done = worker.executor.following.validations.done
            assert len(done) == (7 if every else 0)
        found.append((state, losses))
    (state, losses), (expected, expected_losses) = found[1], found[0]
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_rows_are_the_same_with_and_without_validation(tmp_path, held_out):
    case = replace(wide(2, clip=0.3), sizes=(13,) * 6)
    pipeline = case.pipeline()
    without = results(case, pipeline, pipeline.run())
    validated(case, "1 steps", "valid_auc", 0)
    pipeline = case.pipeline(folder=tmp_path)
    assert_equal(results(case, pipeline, pipeline.run()), without)


def test_the_best_is_that_of_the_averages_where_these_are_kept(tmp_path, numbers):
    inputs, labels, staleness = *numbers, 1
    job = numbers_job(staleness=staleness, ema=0.7)
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 0.9
    job.train.validate.CopyFrom(ValidateSpec(every="1 steps", metric="valid_mse", patience=3))
    steps = of_numbers(1, [16] * 12)

    def make():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = make()

        def forward(self, dense):
            return self.own(dense)

    model, seen = make(), make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.9)
    states, history, best, bad = [], [], None, 0
    for number, batch in enumerate(steps):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        seen.load_state_dict(states[max(0, number - staleness)])
        seen.zero_grad()
        targets = torch.from_numpy(batch.arrays["label.label"])
        nn.functional.mse_loss(seen(torch.from_numpy(batch.arrays["dense"])), targets).backward()
        for own, other in zip(model.parameters(), seen.parameters(), strict=True):
            own.grad = other.grad.clone()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            value = nn.functional.mse_loss(average.module(inputs), labels).item()
        history.append(value)
        if best is None or value < best[0]:
            kept = {name: v.clone() for name, v in average.module.state_dict().items()}
            best, bad = (value, number + 1, kept), 0
        else:
            bad += 1
        if bad == 3:
            break
    assert best[1] < len(history) < 12, "one that shows something"
    pipeline = Pipeline(job, Model, (0,), (2,), steps, 4, folder=tmp_path, restores=True)
    for worker in chain(*pipeline.run()):
        done = worker.executor.following.validations
        assert [one.metrics["valid_mse"] for one in done.done] == pytest.approx(history, abs=1e-4)
        assert done.best.step == best[1]
        with worker.update.averaged():
            for name, value in worker.module.state_dict().items():
                expected = best[2][name.removeprefix("own.")]
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


def test_all_workers_measure_after_the_same_steps_where_time_says_when(tmp_path, held_out):
    case = replace(wide(1), sizes=(13,) * 8)
    validated(case, "0.01s", "valid_auc", 0)
    steps = {
        tuple(one.step for one in worker.executor.following.validations.done)
        for worker in chain(*case.pipeline(folder=tmp_path, restores=True).run())
    }
    (found,) = steps
    assert found[-1] == 8
    assert len(found) > 1


def test_what_is_measured_takes_no_time_of_training(tmp_path, held_out, monkeypatch):
    passed = [1.0]
    clock = SimpleNamespace(perf_counter=lambda: passed[0], monotonic=time.monotonic)
    for module in (progress, busy, executor):
        monkeypatch.setattr(module, "time", clock)

    def taking(seconds, compute):
        def slow(*args):
            passed[0] += seconds
            return compute(*args)

        return slow

    monkeypatch.setattr(StageLayers, "train", taking(1.0, StageLayers.train))
    monkeypatch.setattr(StageLayers, "run", taking(2.0, StageLayers.run))  # of training, too
    monkeypatch.setattr(evaluation.Evaluation, "run", taking(100.0, evaluation.Evaluation.run))
    case = replace(wide(cuts=(4,), widths=(1,)), sizes=(13,) * 6)
    validated(case, "2 steps", "valid_auc", 0)
    ((worker,),) = case.pipeline(folder=tmp_path).run()
    trained, found = 6 * case.micro_batches * 3.0, worker.executor.progress
    assert passed[0] > 300.0 + trained
    assert (found.train_seconds, found.stepped_s, found.busy_s) == (trained,) * 3
    assert found.apart_s > 300.0


def test_a_metric_that_is_no_number_is_never_the_best(tmp_path, held_out):
    held_out[1].fill_(1.0)  # of one class alone: there is no AUC
    case = replace(wide(), sizes=(13,) * STEPS)
    validated(case, "2 steps", "valid_auc", 3)
    for worker in chain(*case.pipeline(folder=tmp_path, restores=True).run()):
        assert worker.executor.progress.step == 6
        assert worker.executor.following.validations.best is None
    assert not [place for place in tmp_path.iterdir() if place.name.isdecimal()]


def test_a_metric_that_is_not_measured_is_refused(tmp_path, held_out):
    case = validated(replace(wide(), sizes=(13,) * STEPS), "2 steps", "max:valid_recall", 0)
    with pytest.raises(ModelError, match=r"'valid_recall' is not measured; expected .* valid_auc"):
        case.pipeline(folder=tmp_path).run()


def test_a_best_state_that_cannot_be_kept_ends_the_training(tmp_path, held_out):
    case = validated(replace(wide(), sizes=(13,) * STEPS), "2 steps", "valid_auc", 0)
    (tmp_path / "dense").write_text("no folder")
    with pytest.raises(BestLostError, match="step 2 is the best so far, and its checkpoint could"):
        case.pipeline(folder=tmp_path).run()


def done(*values, aim="valid_auc", patience=0):
    name = Aim.of(aim).name
    return Validations(
        ValidateSpec(metric=aim, patience=patience),
        [
            Validated(step, {} if value is None else {name: value})
            for step, value in enumerate(values, 1)
        ],
    )


@pytest.mark.parametrize(
    ("name", "greater"),
    [
        ("valid_auc", True),
        ("valid_click_auc", True),
        ("valid_accuracy", True),
        ("valid_logloss", False),
        ("valid_cross_entropy", False),
        ("valid_mse", False),
        ("valid_minutes_mae", False),
        ("valid_loss", False),
        ("valid_bits_per_token", False),
        ("max:valid_recall", True),
        ("min:valid_auc", False),
    ],
)
def test_which_way_is_better(name, greater):
    assert done(1.0, 3.0, 2.0, aim=name).best.step == (2 if greater else 1)


def test_patience_counts_since_the_best():
    assert not done(1.0, 2.0, 1.0, patience=2).is_over
    assert done(1.0, 2.0, 1.0, 1.5, patience=2).is_over
    assert done(2.0, 2.0, 2.0, patience=2).is_over, "as good is not better"
    assert done(2.0, 2.0, 2.0).best.step == 1
    assert not done(2.0, None, 3.0, None, patience=2).is_over
    assert done(2.0, None, None, patience=2).is_over
    assert done(None, None, patience=2).is_over
    assert not done(None, 1.0, patience=2).is_over
    assert not done(3.0, 2.0, 1.0, 0.0).is_over
    assert done(None).best is None
