"""What a job file says of labels, losses and metrics; checked before all else."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final

from chassis.near import did_you_mean, nearest
from heterps.job.checkpoints import Wrong
from heterps.job.inputs import ENDS, LONGEST, MOST_VALUES
from protos.job_pb2 import HeadSpec, JobSpec
from protos.losses import OF_WHOLE_BATCHES

# Of built-in losses, what is measured of held-out samples: as `workers.learning.quality.METRICS`,
# which torch comes with.
METRICS: Final = {
    "bce_with_logits": ("auc", "logloss"),
    "cross_entropy": ("cross_entropy", "accuracy"),
    "mse": ("mse",),
    "mae": ("mae", "mse"),
    "huber": ("mae", "mse"),
    "next_token": ("loss", "bits_per_token"),
    "contrastive": ("cross_entropy", "accuracy"),
    "in_batch_softmax": ("cross_entropy", "accuracy"),
    "pairwise": ("loss",),
}
LOSSES: Final = tuple(METRICS)
LOGGERS: Final = ("tensorboard", "wandb", "mlflow")
_OF_LABELS: Final = tuple(name for name in LOSSES if name != "next_token")
_CONTRASTIVE, _IN_BATCH, _PAIRWISE = OF_WHOLE_BATCHES
_WEIGHT: Final = "weight"  # what losses find data.weight by


def metric_names(job: JobSpec) -> list[str]:
    """The metrics of `data.valid` that are known before training."""
    if job.model.loss:
        found = ["loss"]
    elif job.train.heads:
        found = [
            f"{name}_{metric}"
            for name, head in sorted(job.train.heads.items())
            for metric in METRICS.get(head.loss, ())
        ]
    else:
        found = list(METRICS.get(job.train.loss, ()))
    found += [entry.rpartition(":")[2] for entry in job.model.metrics]
    return [f"valid_{name}" for name in found]


def wrong_learning(job: JobSpec, given: Sequence[str]) -> Iterator[Wrong]:
    """What is wrong with the keys of labels, losses and metrics.

    Args:
        given: the dotted keys that the file has.
    """
    data, train = job.data, job.train
    several = [key for key in ("model.loss", "train.heads", "train.loss") if key in given]
    if len(several) > 1:
        text = f"no more than one of {', '.join(several)}"
        yield Wrong(several[0], repr(job.model.loss or list(train.heads)), text)
    if "data.label" in given and data.labels:
        yield Wrong("data.labels", str(list(data.labels)), "none beside data.label")
    if data.weight and _WEIGHT in data.labels:
        text = "another column: losses find data.weight by this name"
        yield Wrong("data.labels", repr(_WEIGHT), text)
    for name in sorted({name for name in data.labels if list(data.labels).count(name) > 1}):
        yield Wrong("data.labels", f"{name!r} twice", "each column once")
    yield from _wrong_heads(job)
    yield from _wrong_lists(job)
    for pattern, group in sorted(train.optimizer.groups.items()):
        for field, value in group.ListFields():
            if value < 0:
                key = f"train.optimizer.groups.{pattern}.{field.name}"
                yield Wrong(key, f"{value:g}", "a number of at least 0")
    if not 0 <= train.ema < 1:
        yield Wrong("train.ema", f"{train.ema:g}", "a number from 0 to below 1")
    elif train.ema and train.split_experts:
        yield Wrong("train.ema", f"{train.ema:g}", "0: averages of shared-out experts are not kept")
    if not job.model.loss and not train.heads:
        yield from _wrong_loss(job)
    names = [entry.rpartition(":")[2] for entry in job.model.metrics]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Wrong("model.metrics", f"{name!r} twice", "functions of different names")
    yield from _wrong_callbacks(job)


def _wrong_lists(job: JobSpec) -> Iterator[Wrong]:
    """Of labels that are lists."""
    data, heads = job.data, job.train.heads.values()
    there = [data.label] if data.label else list(data.labels)
    lengths = [name for name, one in data.columns.items() if one.length]
    alone = {column for head in heads for column in (head.frequency, head.group)}
    for name, head in job.train.heads.items():
        if head.loss in OF_WHOLE_BATCHES:
            alone.add(head.label or ("label" if data.label else name))
    whole = not heads and job.train.loss in (*OF_WHOLE_BATCHES, "next_token")
    for column, one in sorted(data.label_lists.items()):
        key = f"data.label_lists.{column}"
        said = [bool(one.shape), bool(one.length), bool(one.beside)]
        if column not in there:
            text = f"a column of data.label or data.labels{did_you_mean(column, there)}"
            yield Wrong(key, repr(column), text)
        elif not job.model.loss and (whole or column in alone or (data.label and "label" in alone)):
            yield Wrong(key, repr(column), "none: its loss takes one value a row")
        if sum(said) != 1:
            yield Wrong(key, f"{sum(said)} of them", "one of shape, length and beside")
        elif one.shape and not 1 <= prod(one.shape) <= MOST_VALUES:
            yield Wrong(f"{key}.shape", str(list(one.shape)), f"1 to {MOST_VALUES} values")
        elif one.length > LONGEST:
            yield Wrong(f"{key}.length", str(one.length), f"1 to {LONGEST} values of a list")
        elif one.beside and one.beside not in lengths:
            text = f"an input of data.columns with a length{did_you_mean(one.beside, lengths)}"
            yield Wrong(f"{key}.beside", repr(one.beside), text)
        if one.keep and (not one.length or one.keep not in ENDS):
            text = f"one of {', '.join(ENDS)}" if one.length else "none without a length"
            yield Wrong(f"{key}.keep", repr(one.keep), text)
        if one.missing not in ("", "skip"):
            yield Wrong(f"{key}.missing", repr(one.missing), "skip, or nothing")


def _wrong_callbacks(job: JobSpec) -> Iterator[Wrong]:
    for name in sorted(job.train.loggers):
        if name not in LOGGERS:
            text = f"one of {', '.join(LOGGERS)}{did_you_mean(name, LOGGERS)}"
            yield Wrong("train.loggers", repr(name), text)
    names = [entry.rpartition(":")[2] for entry in job.model.callbacks]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Wrong("model.callbacks", f"{name!r} twice", "callbacks of different names")
    for name in sorted(job.model.callback_args):
        if name not in names:
            hint = did_you_mean(name, names)
            yield Wrong("model.callback_args", repr(name), f"a name of model.callbacks{hint}")


def _wrong_loss(job: JobSpec) -> Iterator[Wrong]:
    loss = job.train.loss
    labelled = bool(job.data.label or job.data.labels)
    lists = not job.data.tokens and any(one.type == "ints" for one in job.data.columns.values())
    if labelled and loss == "next_token" and not (job.data.label and lists):
        text = f"{_or(_OF_LABELS)}, or no data.label, or lists of ints in data.columns"
        yield Wrong("train.loss", repr(loss), text)
    elif not labelled and job.data.tokens and loss != "next_token":
        yield Wrong("train.loss", repr(loss), "next_token, or data.label")
    if len(job.data.labels) > 1:
        text = "train.heads or model.loss, which say what each of data.labels is for"
        yield Wrong("train.loss", repr(loss), text)


def _wrong_heads(job: JobSpec) -> Iterator[Wrong]:
    there = ["label"] if job.data.label else list(job.data.labels)
    for name, head in sorted(job.train.heads.items()):
        key = f"train.heads.{name}"
        if head.loss not in _OF_LABELS:
            near = nearest(head.loss, _OF_LABELS)
            hint = f"; did you mean {near}?" if near else ""
            yield Wrong(f"{key}.loss", repr(head.loss), f"one of {', '.join(_OF_LABELS)}{hint}")
        if job.data.tokens and not there:
            yield Wrong(f"{key}.loss", repr(head.loss), "data.labels beside data.tokens")
        yield from _wrong_comparison(key, head)
        label = head.label or ("label" if job.data.label else name)
        needed = head.label or head.loss != _CONTRASTIVE
        read = {"label": label if needed else "", "frequency": head.frequency, "group": head.group}
        for field, column in read.items():
            if column and column not in there:
                text = f"one of data.labels: {', '.join(there)}"
                yield Wrong(f"{key}.{field}", repr(column), text)
        if head.weight < 0:
            yield Wrong(f"{key}.weight", f"{head.weight:g}", "a number of at least 0")
        if "." in name:
            yield Wrong(key, repr(name), "a name without a dot")


def _wrong_comparison(key: str, head: HeadSpec) -> Iterator[Wrong]:
    """What only losses of whole batches read, or read otherwise."""
    of = list(head.of)
    if head.loss in (_CONTRASTIVE, _IN_BATCH):
        if len(set(of)) != len(of) or len(of) not in (2, 3):
            text = "the names of two outputs of the model, and of a scale where it gives one"
            yield Wrong(f"{key}.of", str(of), text)
    elif len(of) > (head.loss == _PAIRWISE):
        text = "none" if head.loss != _PAIRWISE else "the name of one output of the model"
        yield Wrong(f"{key}.of", str(of), text)
    if head.frequency and head.loss != _IN_BATCH:
        yield Wrong(f"{key}.frequency", repr(head.frequency), f"none but with {_IN_BATCH}")
    if head.group and head.loss != _PAIRWISE:
        yield Wrong(f"{key}.group", repr(head.group), f"none but with {_PAIRWISE}")


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
