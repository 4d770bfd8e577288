"""Hosts with other files at the path of a job's data: samples would count twice, or never."""

import shutil
import subprocess
from pathlib import Path

import pytest

from bench.survive.job import Shape, write_job
from chassis.process import module_argv, spawn
from protos.scheduler_pb2 import END_INVALID_JOB, JobRequest, SubmitRequest
from tests.cluster import Roles

# Another file in the place of one, for a process and its children alone.
_ANOTHER = 'mount --bind "$0" "$1" && shift && exec "$@"'


@pytest.mark.parametrize(
    ("split", "rows"),
    [("train", "in another order"), ("train", "more"), ("test", "in another order")],
)
def test_workers_that_read_other_data_do_not_work_together(
    tmp_path: Path, split: str, rows: str
) -> None:
    folder = tmp_path / "job"
    spec = write_job(folder, Shape(seconds=0.001, steps=5))
    spec.data.test = "test.csv"
    shutil.copy(folder / "train.csv", folder / "test.csv")
    data, other = folder / f"{split}.csv", tmp_path / "other.csv"
    head, *lines = data.read_text().splitlines()
    changed = lines[::-1] if rows == "in another order" else [*lines, *lines[:20]]
    other.write_text("\n".join([head, *changed]) + "\n")
    elsewhere = ["unshare", "--mount", "sh", "-c", _ANOTHER, str(other), str(data)]
    if not shutil.which("unshare") or subprocess.run([*elsewhere, "true"], check=False).returncode:
        pytest.skip("nobody may mount a file here")
    with Roles(tmp_path) as roles:
        scheduler = roles.scheduler()
        for kind, units in (("cpu", 1), ("front", 1), ("back", 2)):
            roles.node(scheduler, kind, "--units", str(units), "--emulate")
        to = ("--scheduler", scheduler.address, "--type", "front", "--units", "1", "--emulate")
        node = module_argv("workers.node", *to, "--notice", "0", "--node-id", "elsewhere")
        child = spawn("elsewhere", [*elsewhere, *node], directory=tmp_path / "logs")
        try:
            child.wait_ready(120.0)
            stub = roles.stub(scheduler)
            stub.Submit(SubmitRequest(job_id="job", job=spec), timeout=20)
            status = list(stub.WatchJob(JobRequest(job_id="job"), timeout=120))[-1]
        finally:
            child.stop(8.0)
    assert status.step == 0
    assert status.end_reason == END_INVALID_JOB, status.reason
    assert f"data.{split}: {split}.csv: stage 0 worker " in status.error
    assert "found other contents than stage 0 worker " in status.error
    assert "on node elsewhere" in status.error
