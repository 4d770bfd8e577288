"""What a job file says of checkpoints and of what weights begin as; checked before all else."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chassis.interval import EXPECTED, Interval
from chassis.near import nearest
from protos.job_pb2 import JobSpec

DIRECTIONS = ("max", "min")
MODEL, CUT = "model.json", "cut.json"  # what tells a folder of either
_WEIGHTS = (".pt", ".pth", ".bin", ".safetensors")
_NAMED = re.compile(r"(?P<job>[A-Za-z0-9][A-Za-z0-9._-]{0,63})(@(?P<step>[0-9]{1,18}))?")
_FROM = "a saved model, a checkpoint of a job, a state_dict (.pt, .safetensors), or JOB[@STEP]"


@dataclass(frozen=True, slots=True)
class Wrong:
    """A value that cannot be used."""

    key: str
    got: str
    expected: str


@dataclass(frozen=True, slots=True)
class Named:
    """A job's model, or its state after a step, as JOB[@STEP] names them."""

    job: str
    step: int | None = None

    @classmethod
    def of(cls, text: str) -> "Named | None":
        """Read it; None where it is no such name."""
        found = _NAMED.fullmatch(text)
        if found is None:
            return None
        return cls(found["job"], None if found["step"] is None else int(found["step"]))


def is_place(text: str) -> bool:
    """Whether a completed `train.from` is a place, and not JOB[@STEP]."""
    return text.startswith("/") or "://" in text


def own_metrics(job: JobSpec) -> list[str]:
    """Metrics of the job's own, of which nobody else knows whether greater is better."""
    return [f"valid_{entry.rpartition(':')[2]}" for entry in job.model.metrics]


def wrong_checkpoints(job: JobSpec, metrics: Sequence[str]) -> Iterator[Wrong]:
    """What is wrong with `train.checkpoint` and `train.validate`.

    Args:
        metrics: that are known before training.
    """
    spec, key = job.train.checkpoint, "train.checkpoint"
    yield from _wrong_interval(f"{key}.every", spec.every)
    for name, value in (("keep", spec.keep), ("best", spec.best)):
        if value and not spec.every and not (name == "keep" and job.train.validate.every):
            yield Wrong(f"{key}.{name}", repr(value), f"none without {key}.every")
    yield from wrong_metric(job, f"{key}.best", spec.best, metrics)
    validate, key = job.train.validate, "train.validate"
    yield from _wrong_interval(f"{key}.every", validate.every)
    given = validate.metric or validate.patience
    if given and not validate.every:
        yield Wrong(f"{key}.every", "nothing", EXPECTED)
    if validate.every and not validate.metric:
        yield Wrong(f"{key}.metric", "nothing", f"one of {', '.join(metrics)}")
    yield from wrong_metric(job, f"{key}.metric", validate.metric, metrics)


def _wrong_interval(key: str, text: str) -> Iterator[Wrong]:
    try:
        if text:
            Interval.of(text)
    except ValueError:
        yield Wrong(key, repr(text), EXPECTED)


def wrong_metric(job: JobSpec, key: str, text: str, metrics: Sequence[str]) -> Iterator[Wrong]:
    """What is wrong with the metric that says which state is the best.

    Args:
        key: that it stands at.
        text: as `chassis.aim.Aim` reads it; "" for none.
        metrics: that are known before training.
    """
    if not text:
        return
    direction, colon, name = text.rpartition(":")
    own = own_metrics(job)
    if colon and direction not in DIRECTIONS:
        yield Wrong(key, repr(text), f"max:{name} or min:{name}")
    elif name not in metrics and not any(name.startswith(f"{one}_") for one in own):
        near = nearest(name, metrics)
        hint = f"; did you mean {near}?" if near else ""
        yield Wrong(key, repr(text), f"one of {', '.join(metrics)}{hint}")
    elif not colon and name.startswith(tuple(own)):
        yield Wrong(key, repr(text), f"max:{name} or min:{name}")
    elif not job.data.valid:
        yield Wrong(key, repr(text), "none without data.valid")


def complete_origin(job: JobSpec) -> Iterator[Wrong]:
    """Make the path in `train.from` absolute; what is wrong with it."""
    text = job.train.warm_start
    if not text or "://" in text:
        return
    path = Path(job.directory, Path(text).expanduser())
    if not path.exists():
        if "/" in text or path.suffix in _WEIGHTS or Named.of(text) is None:
            yield Wrong("train.from", repr(text), f"{_FROM}; there is nothing at {path}")
        return
    if path.is_dir() and not any((path / name).is_file() for name in (MODEL, CUT)):
        yield Wrong("train.from", repr(text), f"{_FROM}; {path} has no {MODEL} and no {CUT}")
    elif path.is_file() and path.suffix not in _WEIGHTS:
        yield Wrong("train.from", repr(text), _FROM)
    job.train.warm_start = str(path.absolute())
