"""What a job takes over of an earlier one's files: all that its cut needs, and for good."""

import hashlib
from pathlib import Path

import pytest

from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import JobStatus
from scheduler.service.access import Access
from scheduler.service.artifacts import Artifacts
from scheduler.service.origins import GoneError, Origins
from scheduler.state.jobs import Jobs
from scheduler.state.store import Store

FILES = (
    *("model.json", "dense.safetensors", "tables/manifest.json"),
    *("cuts/10/cut.json", "cuts/20/cut.json", "cuts/dense/a.safetensors"),
    *("cuts/tables/10-1/manifest.json", "cuts/tables/20-1/save-x/rows"),
)


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    kept = Artifacts(tmp_path, lambda job_id: True)
    for name in FILES:
        data = name.encode()
        digest = hashlib.sha256(data).hexdigest()
        kept.receive(digest, len(data), iter([data]))
        kept.name("old", name, digest)
    return kept


@pytest.fixture
def origins(artifacts: Artifacts, store: Store) -> Origins:
    jobs = Jobs(store)
    return Origins(artifacts, jobs, Access(None, jobs.get))  # type: ignore[arg-type]


def test_a_cut_is_taken_over_with_what_all_cuts_share(
    artifacts: Artifacts, origins: Origins
) -> None:
    job = JobSpec()
    job.train.resume.step, job.train.resume.place = 10, "heterps://before:1/old/cuts/10"
    origins.take_over(job, "new")
    assert list(artifacts.files("new")) == [
        *("from/10/cut.json", "from/dense/a.safetensors"),
        *("from/tables/10-1/manifest.json", "from/tables/20-1/save-x/rows"),
    ]
    origins.forget("old")
    assert list(artifacts.files("old")) == [
        "dense.safetensors",
        "model.json",
        "tables/manifest.json",
    ]
    stream, _ = artifacts.open(job_id="new", name="from/10/cut.json")
    with stream:
        assert stream.read() == b"cuts/10/cut.json", "what was lent stays"
    with pytest.raises(GoneError, match="its cut of step 10 is not kept any more"):
        origins.take_over(job, "newer")


def test_a_model_is_taken_over_without_the_cuts(artifacts: Artifacts, origins: Origins) -> None:
    origins.take_over(JobSpec(train={"warm_start": "heterps://h:1/old"}), "new")
    assert list(artifacts.files("new")) == [
        *("from/dense.safetensors", "from/model.json", "from/tables/manifest.json")
    ]
    with pytest.raises(GoneError, match="job none: its model is not kept"):
        origins.take_over(JobSpec(train={"warm_start": "heterps://h:1/none"}), "newer")
    assert artifacts.files("newer") == {}


def test_cuts_that_are_gone_are_not_listed(artifacts: Artifacts, origins: Origins) -> None:
    status = JobStatus(job_id="old")
    for step in (10, 15, 20):
        status.cuts.add(step=step, place=f"heterps://before:1/old/cuts/{step}")
    status.cuts.add(step=30, place="/disk/old.cuts/30")
    origins.drop_gone(status)
    assert [cut.step for cut in status.cuts] == [10, 20, 30]
