"""What a job may go on from: a cut that is there, of a job that has ended, of the same training."""

from pathlib import Path

import pytest

from heterps.client.origins import OriginError, check_same, origin_of, take_up, weights_of
from heterps.client.records import Job
from heterps.job.file import load_job
from protos import scheduler_pb2 as pb
from protos.job_pb2 import JobSpec


def ended(tmp_path: Path, state: "pb.JobState.ValueType" = pb.FAILED) -> Job:
    status = pb.JobStatus(job_id="old", state=state)
    for step in (10, 20):
        folder = tmp_path / "old.cuts" / str(step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cut.json").write_text("{}")
        status.cuts.add(step=step, place=str(folder), samples=step * 16)
    return Job.of(status)


def test_the_newest_or_the_named_one(tmp_path: Path) -> None:
    job = ended(tmp_path)
    assert (origin_of(job, None).step, origin_of(job, None).samples) == (20, 320)
    origin = origin_of(job, 10)
    assert (origin.job_id, origin.step) == ("old", 10)
    assert origin.place == str(tmp_path / "old.cuts/10")
    with pytest.raises(OriginError, match="no checkpoint of step 15; expected one of 10, 20"):
        origin_of(job, 15)


def test_one_that_is_gone_is_not_gone_on_from(tmp_path: Path) -> None:
    job = ended(tmp_path)
    (tmp_path / "old.cuts/20/cut.json").unlink()
    assert origin_of(job, None).step == 10
    with pytest.raises(OriginError, match="expected one of 10"):
        origin_of(job, 20)
    (tmp_path / "old.cuts/10/cut.json").unlink()
    with pytest.raises(OriginError, match="has no checkpoint"):
        origin_of(job, None)


def test_a_job_that_runs_is_not_gone_on_from_and_its_weights_may_be_taken(tmp_path: Path) -> None:
    job = ended(tmp_path, pb.RUNNING)
    with pytest.raises(OriginError, match="is running; expected one that has ended"):
        origin_of(job, None)
    assert weights_of(job, None) == str(tmp_path / "old.cuts/20")


def test_weights_are_those_of_the_model_where_there_is_one(tmp_path: Path) -> None:
    status = pb.JobStatus(job_id="old", state=pb.SUCCEEDED, output="/models/old")
    status.cuts.add(step=10, place="heterps://h:1/old/cuts/10")
    assert weights_of(Job.of(status), None) == "/models/old"
    assert weights_of(Job.of(status), 10) == "heterps://h:1/old/cuts/10"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("train.batch_size=512", "train.batch_size"),
        ("train.staleness=0", "train.staleness"),
        ("train.optimizer.learning_rate=0.5", "train.optimizer.learning_rate"),
        ("train.seed=7", "train.seed"),
        ("train.epochs=3", "train.epochs"),
        ("model.args.rate=2.0", "model.args"),
        ("data.dense=[]", "data.dense"),
        ("data.sparse=[user]", "data.sparse"),
        ("tables={ids: {learning_rate: 0.5}}", "tables.ids"),
        ("tables={ids: {admission: {kind: count, threshold: 2}}}", "tables.ids"),
    ],
)
def test_another_training_is_refused_by_name(job: Path, override: str, key: str) -> None:
    with pytest.raises(OriginError, match=f"{key}: got .*, expected .*, as of old"):
        check_same(load_job(job, [override]), load_job(job), "old")


def test_another_plan_is_the_same_training(job: Path) -> None:
    before = load_job(job)
    before.code_digest, before.data.path = "abc", "/data"
    new = load_job(
        job,
        [
            *("schedule.method=exact", "servers.shards=3", "output=out", "retries=2", "name=more"),
            *("train.checkpoint.every=5m", "train.checkpoint.keep=2", "priority=4"),
            "tables={ids: {memory_bytes: 100000000}}",
        ],
    )
    take_up(new, before, "old")
    assert (new.code_digest, new.data.path) == ("abc", "/data")
    assert (new.schedule.method, new.retries, new.name) == ("exact", 2, "more")
    assert new.output == str(job.parent / "out")


def test_a_model_file_that_has_changed_is_refused(job: Path) -> None:
    before = load_job(job)
    (job.parent / "model.py").write_text("def build(hidden, rate): return 1\n")
    with pytest.raises(OriginError, match=r"model\.py is not as it was for old"):
        check_same(load_job(job), before, "old")
    check_same(load_job(job), JobSpec(model=before.model, data=before.data, train=before.train), "")
