"""`train.checkpoint` and `train.from` in a job file, and what `train --resume` finds."""

import json
import os
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict

from chassis.interval import Interval
from heterps.job.file import JobFileError, load_job
from heterps.job.resume import ResumeError, newest, running
from protos.job_pb2 import JobSpec


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("5m", Interval(seconds=300)),
        ("30 s", Interval(seconds=30)),
        ("1.5h", Interval(seconds=5400)),
        ("200 steps", Interval(steps=200)),
        ("1 step", Interval(steps=1)),
    ],
)
def test_how_often(job: Path, text: str, interval: Interval) -> None:
    assert load_job(job, [f"train.checkpoint.every={text}"]).train.checkpoint.every == text
    assert Interval.of(text) == interval


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("every", "5 minutes", "got '5 minutes', expected a time or a number of steps above 0"),
        ("every", "0s", "expected a time"),
        ("every", "0 steps", "expected a time"),
        ("every", "-5m", "expected a time"),
        ("every", "'20'", "expected a time"),
        ("keep", "2", "got 2, expected none without train.checkpoint.every"),
        ("keep", "-1", "expected a whole number"),
    ],
)
def test_what_is_wrong_is_named(job: Path, key: str, value: str, said: str) -> None:
    with pytest.raises(JobFileError) as refused:
        load_job(job, [f"train.checkpoint.{key}={value}"])
    assert f"train.checkpoint.{key}: " in str(refused.value)
    assert said in str(refused.value)


def test_what_weights_begin_as_is_there_or_is_a_job(job: Path) -> None:
    folder = job.parent
    (folder / "model").mkdir()
    (folder / "model/model.json").write_text("{}")
    (folder / "empty").mkdir()
    (folder / "state.pt").write_bytes(b"")
    (folder / "notes.txt").write_text("")

    def read(text: str) -> str:
        return load_job(job, [f"train.from={text}"]).train.warm_start

    assert read("model") == str(folder / "model")
    assert read("state.pt") == str(folder / "state.pt")
    for same in ("clicks-1a2b3c", "clicks-1a2b3c@400", "s3://bucket/model"):
        assert read(same) == same
    for wrong in ("./nothing", "nothing.pt", "empty", "notes.txt", "job@last", "a b"):
        with pytest.raises(JobFileError, match=r"train\.from: got .*, expected a saved model"):
            read(wrong)


def left(job: Path, job_id: str, step: int, at: float, name: str = "clicks") -> Path:
    """A checkpoint in the output folder, as workers leave it."""
    spec = load_job(job, [f"name={name}"])
    folder = job.parent / "runs" / f"{job_id}.cuts" / str(step)
    folder.mkdir(parents=True)
    facts = {
        "format": "heterps-cut-1",
        "job_id": job_id,
        "step": step,
        "samples": step * 16,
        "taken_at": at,
        "job": MessageToDict(spec, preserving_proto_field_name=True),
    }
    (folder / "cut.json").write_text(json.dumps(facts))
    return folder


def training(job: Path) -> JobSpec:
    spec = load_job(job)
    spec.output = "runs"
    return spec


def test_the_newest_checkpoint_of_that_name_is_gone_on_from(job: Path) -> None:
    with pytest.raises(ResumeError, match="no checkpoint of clicks"):
        newest(training(job))
    left(job, "clicks-a", 30, at=5.0)
    last = left(job, "clicks-b", 20, at=9.0)
    left(job, "other-c", 90, at=99.0, name="other")
    broken = left(job, "clicks-d", 40, at=50.0)
    (broken / "cut.json").write_text('{"format": "heterps-cut-1", "job_id"')
    found = newest(training(job))
    assert (found.origin.job_id, found.origin.step, found.origin.samples) == ("clicks-b", 20, 320)
    assert found.origin.place == str(last)
    assert found.job.model.entry == "model.py:build"


def test_a_run_that_has_ended_is_not_gone_on_with(job: Path) -> None:
    left(job, "clicks-a", 30, at=5.0)
    model = job.parent / "runs/clicks-a"
    model.mkdir()
    (model / "model.json").write_text("{}")
    with pytest.raises(ResumeError, match="clicks-a has ended, and its model is there"):
        newest(training(job))


def test_a_run_that_still_runs_is_not_gone_on_with(job: Path) -> None:
    left(job, "clicks-a", 30, at=5.0)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:  # a process of its own, as the lock is a process's
        with running(job.parent / "runs", "clicks-a"):
            os.write(ready[1], b"1")
            os.read(go[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(ResumeError, match="clicks-a still runs"):
        newest(training(job))
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert newest(training(job)).origin.step == 30
