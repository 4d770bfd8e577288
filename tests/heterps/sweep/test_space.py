"""What is tried of which keys, and that a job takes it."""

import optuna
import pytest

from heterps.job.file import JobFileError, load_job
from heterps.sweep.errors import SweepError
from heterps.sweep.parameters import Choice, Range, parameter_of
from heterps.sweep.space import Space
from tests.heterps.sweep_jobs import write_job

RATE = "train.optimizer.learning_rate"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=log:1e-4..1e-1", Range(RATE, 1e-4, 0.1, whole=False, log=True)),
        ("train.batch_size=log:128..4096", Range("train.batch_size", 128, 4096, True, True)),
        ("train.ema=float:0..0.99", Range("train.ema", 0, 0.99, False, False)),
        ("train.clip=int:1..4", Range("train.clip", 1, 4, True, False)),
        ("model.args.dim=int:log:4..64", Range("model.args.dim", 4, 64, True, True)),
        ("model.args.rate=log:1..64", Range("model.args.rate", 1, 64, False, True)),
        ("tables.rows.seed=int:0..9", Range("tables.rows.seed", 0, 9, True, False)),
        ("train.optimizer.name=choice:adam,sgd", Choice("train.optimizer.name", ("adam", "sgd"))),
        ("model.args.hidden=choice:[64],[64, 32]", Choice("model.args.hidden", ([64], [64, 32]))),
        ("train.checkpoint.every=5m", None),
        ("model.metrics=[metrics.py:recall]", None),
        ("train.validate.metric=max:valid_recall", None),
    ],
)
def test_ranges_have_the_type_of_their_key(text, expected):
    assert parameter_of(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr=log:0..1", "above 0"),
        ("lr=log:1..0.1", "the lower number first"),
        ("lr=float:1..1", "the lower number first"),
        ("lr=float:0..inf", "finite"),
        ("lr=float:nan..1", "finite"),
        ("lr=log:1e-4", "expected a value, a range"),
        ("lr=log:log:1..2", "expected a value, a range"),
        ("lr=int:float:1..2", "whole number"),
        ("lr=float:one..2", "expected two numbers"),
        ("train.batch_size=float:1..9", "expected int: or log:"),
        ("train.batch_size=log:1.5..9", "expected whole numbers"),
        ("lr=choice:0.1", "several values"),
        ("lr=choice:0.1,[", "several values"),
        ("data.valid=choice:a.csv,b.csv", "one value for all trials"),
        ("data.weight=choice:shown,clicked", "one value for all trials"),
        ("train.validate.metric=choice:valid_auc,valid_logloss", "one value for all trials"),
    ],
)
def test_what_is_no_range_is_refused_with_what_was_typed(text, said):
    with pytest.raises(SweepError) as refused:
        parameter_of(text)
    assert f"--set {text}" in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.optimizer.learning_rat=log:1e-4..1", f"did you mean {RATE}?"),
        ("learning_rate=log:1e-4..1", f"did you mean {RATE}?"),
        ("train.batch_size=int:0..8", "a number above 0"),
        ("train.epochs=int:1..99999999999", "a whole number from"),
        ("train.optimizer.name=choice:adam,adamax", "did you mean"),
        ("train.ema=float:0..1", "from 0 to below 1"),
        ("train.batch_size=choice:128,many", "expected a whole number"),
    ],
)
def test_the_job_is_checked_with_both_ends_before_anything_starts(tmp_path, text, said):
    with pytest.raises(JobFileError) as refused:
        Space(write_job(tmp_path), [text])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "text", ["train.seed=choice:1,2,1", "train.seed=choice:1,1.0", "lr=choice:0.1,1e-1"]
)
def test_two_values_that_make_one_job_are_refused(tmp_path, text):
    with pytest.raises(SweepError, match="makes the job of another of its values"):
        Space(write_job(tmp_path), [text])


def test_batches_that_samples_are_measured_in_are_the_same_in_all_trials(tmp_path):
    set_batch = "train.batch_size=choice:64,256"
    Space(write_job(tmp_path), [set_batch, "lr=0.1"])
    pairs = {"  max_steps: 30\n": "  max_steps: 30\n  loss: pairwise\n", "valid_auc": "valid_loss"}
    file = write_job(tmp_path, **pairs)
    Space(file, ["train.batch_size=64", "lr=log:0.1..1"])
    with pytest.raises(SweepError, match=r"train\.batch_size: expected one value for all trials"):
        Space(file, [set_batch])


def test_something_is_tried_and_each_key_once(tmp_path):
    file = write_job(tmp_path)
    with pytest.raises(SweepError, match="expected a range to try"):
        Space(file, ["lr=0.1"])
    with pytest.raises(SweepError, match=f"one range of {RATE}"):
        Space(file, ["lr=log:0.1..1", f"{RATE}=log:0.2..1"])


def test_values_reach_the_job_in_all_their_digits_and_a_job_file_keeps_them(tmp_path):
    ranges = ["lr=log:1e-9..1e9", "train.batch_size=int:1..4000", "tables.rows.scale=float:0..1"]
    choices = ["model.args.pause_s=choice:0.0,1e-7", "train.optimizer.name=choice:adam,sgd"]
    space = Space(write_job(tmp_path), [*ranges, *choices, "train.epochs=3"])
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    jobs = set()
    for number in range(12):
        values = space.suggest(study.ask())
        job = space.job(values)
        assert job.train.optimizer.learning_rate == values[RATE]
        assert job.tables["rows"].scale == values["tables.rows.scale"]
        assert job.train.batch_size == values["train.batch_size"]
        assert job.train.optimizer.name == values["train.optimizer.name"]
        assert job.model.args["pause_s"] == values["model.args.pause_s"]
        assert job.train.epochs == 3
        jobs.add(job.SerializeToString(deterministic=True))
        if not number % 6:
            space.write(tmp_path / "job.best.yaml", values, "a trial")
            assert load_job(tmp_path / "job.best.yaml") == job
    assert len(jobs) == 12


def test_a_file_of_somebody_else_is_not_written_over(tmp_path):
    space = Space(write_job(tmp_path), ["lr=log:0.1..1"])
    (tmp_path / "job.best.yaml").write_text("name: mine\n")
    with pytest.raises(SweepError, match="expected no file there"):
        space.write(tmp_path / "job.best.yaml", {RATE: 0.2}, "a trial")
    assert (tmp_path / "job.best.yaml").read_text() == "name: mine\n"


@pytest.mark.parametrize(
    ("metric", "aim"),
    [
        ("valid_auc", ("valid_auc", True)),
        ("valid_logloss", ("valid_logloss", False)),
        ("min:valid_auc", ("valid_auc", False)),
    ],
)
def test_trials_are_compared_the_way_that_the_metric_says(tmp_path, metric, aim):
    validate = "  validate: {every: 10 steps, metric: valid_auc}\n"
    space = Space(write_job(tmp_path, **{validate: ""}), ["lr=log:0.1..1"])
    found = space.aim(metric)
    assert (found.name, found.greater) == aim
    assert not space.can_prune


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (None, "or --metric with one of valid_auc, valid_logloss"),
        ("test_auc", "got 'test_auc', expected one of valid_auc"),
        ("valid_mse", "got 'valid_mse', expected one of valid_auc"),
    ],
)
def test_a_metric_that_is_not_measured_is_refused(tmp_path, metric, said):
    validate = "  validate: {every: 10 steps, metric: valid_auc}\n"
    space = Space(write_job(tmp_path, **{validate: ""}), ["lr=log:0.1..1"])
    with pytest.raises(SweepError) as refused:
        space.aim(metric)
    assert said in str(refused.value)


def test_the_metric_of_validation_stands_alone(tmp_path):
    space = Space(write_job(tmp_path), ["lr=log:0.1..1"])
    assert space.can_prune
    with pytest.raises(SweepError, match=r"none beside train\.validate\.metric"):
        space.aim("valid_logloss")
