"""Labels, losses and metrics of a job file."""

import pytest

from heterps.job import learning
from heterps.job.file import JobFileError, load_job
from heterps.job.learning import metric_names
from heterps.job.rewrite import job_content
from protos.losses import of_whole_batches
from workers.data.columns.labels import labels_of
from workers.learning.quality import METRICS

HEADS = (
    "data.labels=[click, delay]",
    "train.heads.click.loss=bce_with_logits",
    "train.heads.minutes={loss: huber, label: delay, weight: 0.5}",
)


@pytest.fixture
def unlabelled(job):
    lines = [line for line in job.read_text().splitlines() if not line.strip().startswith("label:")]
    job.write_text("\n".join(lines) + "\n")
    return job


def test_metrics_have_one_list():
    assert learning.METRICS == METRICS


def test_heads_are_read_and_written_again(unlabelled):
    spec = load_job(unlabelled, HEADS)
    assert list(spec.data.labels) == ["click", "delay"]
    assert spec.train.loss == ""
    assert spec.train.heads["click"].loss == "bce_with_logits"
    minutes = spec.train.heads["minutes"]
    assert (minutes.loss, minutes.label, minutes.weight) == ("huber", "delay", 0.5)
    names = ["valid_click_auc", "valid_click_logloss", "valid_minutes_mae", "valid_minutes_mse"]
    assert metric_names(spec) == names
    for weight in ("0", "0.0"):
        none = load_job(unlabelled, [*HEADS, f"train.heads.minutes.weight={weight}"])
        assert job_content(none)["train"]["heads"]["minutes"]["weight"] == 0
    assert "weight" not in job_content(spec)["train"]["heads"]["click"]
    again = job_content(spec)
    assert again["train"]["heads"]["minutes"] == {"loss": "huber", "label": "delay", "weight": 0.5}


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["train.heads.click.loss=bse"], "train.heads.click.loss: got 'bse', expected one of"),
        (["train.heads.click.lose=mse"], "train.heads.click.lose: unknown key; did you mean"),
        (["train.heads.click.label=clik"], "got 'clik', expected one of data.labels: click, delay"),
        (["train.heads.click.weight=-1"], "got -1, expected a number of at least 0"),
        (["train.heads.like.loss=mse"], "train.heads.like.label: got 'like', expected one of"),
        (["train.heads.click=mse"], "expected a mapping with keys of loss, label, weight"),
        (["train.loss=mse"], "expected no more than one of train.heads, train.loss"),
        (["data.labels=[click, click, delay]"], "'click' twice, expected each column once"),
        (["data.labels=[click, delay, weight]", "data.weight=w"], "losses find data.weight by"),
        (["data.label=click"], "expected none beside data.label"),
        (["data.sparse=[click]"], "the label 'click', expected columns known before"),
        (["model.loss=losses.py:total"], "expected no more than one of model.loss, train.heads"),
        (["model.metrics=[metrics.py:recall]"], "model.metrics: got 'metrics.py', expected a file"),
        (["train.checkpoint={every: 2 steps, best: valid_auc}"], "one of valid_click_auc"),
    ],
)
def test_what_does_not_go_together_is_named(unlabelled, assignments, expected):
    with pytest.raises(JobFileError) as caught:
        load_job(unlabelled, (*HEADS, *assignments))
    assert expected in "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["data.label_lists.clik.length=3"], "'clik', expected a column of data.label or"),
        (["data.label_lists.click={}"], "0 of them, expected one of shape, length and beside"),
        (["data.label_lists.click={length: 3, shape: [2]}"], "2 of them, expected one of"),
        (["data.label_lists.click.beside=ids"], "beside: got 'ids', expected an input of"),
        (["data.label_lists.click={shape: [2], keep: last}"], "expected none without a length"),
        (["data.label_lists.click={length: 2, keep: end}"], "'end', expected one of first, last"),
        (["data.label_lists.click={length: 2, missing: drop}"], "expected skip, or nothing"),
        (["data.label_lists.click.shape=[0]"], "shape: got [0], expected 1 to"),
        (["data.label_lists.click.length=70000"], "got 70000, expected 1 to 65536 values"),
        (
            ["data.label_lists.delay.length=2", "train.heads.rank={loss: pairwise, label: delay}"],
            "data.label_lists.delay: got 'delay', expected none: its loss takes one value a row",
        ),
    ],
)
def test_lists_of_labels_are_described_whole(unlabelled, assignments, expected):
    spec = load_job(unlabelled, [*HEADS, "data.label_lists.click.shape=[3, 2]"])
    assert list(spec.data.label_lists["click"].shape) == [3, 2]
    with pytest.raises(JobFileError) as caught:
        load_job(unlabelled, (*HEADS, *assignments))
    assert expected in "\n".join(caught.value.problems)


WHOLE = (
    "data.labels=[rank, item, seen]",
    "train.heads.match={loss: contrastive, of: [image, text]}",
    "train.heads.find={loss: in_batch_softmax, of: [user, item, scale], label: item}",
    "train.heads.find.frequency=seen",
    "train.heads.rank={loss: pairwise, group: item}",
)


def test_losses_of_whole_batches_are_read(unlabelled):
    spec = load_job(unlabelled, WHOLE)
    assert list(spec.train.heads["find"].of) == ["user", "item", "scale"]
    assert spec.train.heads["find"].frequency == "seen"
    assert spec.train.heads["rank"].group == "item"
    assert of_whole_batches(spec)
    found = ["find_cross_entropy", "find_accuracy", "match_cross_entropy", "match_accuracy"]
    assert metric_names(spec) == [f"valid_{name}" for name in (*found, "rank_loss")]
    # Which alone needs no label.
    alone = load_job(unlabelled, ["train.loss=contrastive"])
    assert not labels_of(alone)
    for loss in ("pairwise", "in_batch_softmax", "mse"):
        with pytest.raises(JobFileError, match=r"data\.label: missing"):
            load_job(unlabelled, [f"train.loss={loss}"])


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (
            ["train.heads.match.of=[image]"],
            "match.of: got ['image'], expected the names",
        ),
        (["train.heads.match.of=[image, image]"], "expected the names of two outputs"),
        (["train.heads.rank.of=[a, b]"], "train.heads.rank.of: got ['a', 'b'], expected the name"),
        (
            ["train.heads.seen={loss: mse, of: [seen]}"],
            "heads.seen.of: got ['seen'], expected",
        ),
        (["train.heads.rank.frequency=seen"], "expected none but with in_batch_softmax"),
        (["train.heads.find.group=item"], "expected none but with pairwise"),
        (["train.heads.find.frequency=often"], "got 'often', expected one of data.labels"),
        (["train.heads.find.label=it"], "train.heads.find.label: got 'it', expected one of"),
        (["train.heads.match.label=it"], "train.heads.match.label: got 'it', expected one of"),
    ],
)
def test_what_a_loss_of_whole_batches_cannot_read_is_named(unlabelled, assignments, expected):
    with pytest.raises(JobFileError) as caught:
        load_job(unlabelled, (*WHOLE, *assignments))
    assert expected in "\n".join(caught.value.problems)


def test_one_loss_does_for_one_label(unlabelled):
    with pytest.raises(JobFileError, match=r"train\.heads or model\.loss"):
        load_job(unlabelled, ["data.labels=[click, delay]"])
    assert load_job(unlabelled, ["data.labels=[click]"]).train.loss == "bce_with_logits"


def test_a_metric_of_the_jobs_own_says_which_way_is_better(unlabelled):
    (unlabelled.parent / "metrics.py").write_text("def recall(outputs, batch):\n    return 0.5\n")
    given = (
        *HEADS,
        *("model.metrics=[metrics.py:recall]", "data.valid=v.parquet", "train.staleness=0"),
    )
    for best in ("max:valid_recall", "min:valid_recall", "valid_click_auc", "max:valid_recall_5"):
        load_job(unlabelled, [*given, f"train.checkpoint={{every: 2 steps, best: '{best}'}}"])
    for best in ("valid_recall", "most:valid_recall"):
        with pytest.raises(JobFileError, match="max:valid_recall or min:valid_recall"):
            load_job(unlabelled, [*given, f"train.checkpoint={{every: 2 steps, best: '{best}'}}"])


@pytest.mark.parametrize(
    ("validate", "expected"),
    [
        ("{every: 2 steps}", "train.validate.metric: got nothing, expected one of valid_auc"),
        ("{metric: valid_auc}", "train.validate.every: got nothing, expected a time or a number"),
        ("{patience: 2}", "train.validate.every: got nothing, expected a time or a number"),
        ("{every: often, metric: valid_auc}", "train.validate.every: got 'often', expected a time"),
        ("{every: 1m, metric: valid_acu}", "got 'valid_acu', expected one of valid_auc, valid_log"),
        ("{every: 1m, metric: valid_recall}", "expected max:valid_recall or min:valid_recall"),
        ("{every: 1m, metric: valid_auc, patience: -1}", "expected a whole number from 0"),
        ("{every: 1m, metric: valid_auc, delta: 1}", "train.validate.delta: unknown key"),
    ],
)
def test_validation_in_training_is_checked(unlabelled, validate, expected):
    (unlabelled.parent / "metrics.py").write_text("def recall(outputs, batch):\n    return 0.5\n")
    given = ["data.labels=[click]", "model.metrics=[metrics.py:recall]", "data.valid=v.parquet"]
    with pytest.raises(JobFileError) as caught:
        load_job(unlabelled, [*given, f"train.validate={validate}"])
    assert expected in "\n".join(caught.value.problems)
    for metric in ("valid_auc", "min:valid_logloss", "max:valid_recall"):
        load_job(unlabelled, [*given, f"train.validate={{every: 2 steps, metric: '{metric}'}}"])
    with pytest.raises(JobFileError, match=r"expected none without data\.valid"):
        load_job(unlabelled, [*given[:1], "train.validate={every: 1m, metric: valid_auc}"])


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["train.ema=1"], "train.ema: got 1, expected a number from 0 to below 1"),
        (
            ["train.ema=0.9", "train.split_experts=true"],
            "train.ema: got 0.9, expected 0: averages of",
        ),
        (
            ["train.optimizer.groups={'head.*': {learning_rate: -1}}"],
            "train.optimizer.groups.head.*.learning_rate: got -1, expected a number of at least 0",
        ),
        (["train.optimizer.groups={'head.*': {rate: 1}}"], "groups.head.*.rate: unknown key"),
    ],
)
def test_groups_and_averages_are_checked(unlabelled, assignments, expected):
    with pytest.raises(JobFileError) as caught:
        load_job(unlabelled, ("data.labels=[click]", *assignments))
    assert expected in "\n".join(caught.value.problems)


def test_groups_are_by_pattern(unlabelled):
    groups = "train.optimizer.groups={'head.*': {learning_rate: 0}, '*.bias': {weight_decay: 0.1}}"
    spec = load_job(unlabelled, ["data.labels=[click]", groups]).train.optimizer
    assert spec.groups["head.*"].HasField("learning_rate")
    assert not spec.groups["head.*"].HasField("weight_decay")
    assert spec.groups["*.bias"].weight_decay == 0.1
