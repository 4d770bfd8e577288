"""Where a job's data is, once its code is sent."""

import os

import pytest

from heterps.job.packaging import pack
from heterps.job.sending import settle
from protos.job_pb2 import JobSpec


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("data", "", "data"),
        ("mixed", "", None),  # a folder of files, of which one stays
        ("left", "", None),
        ("data", "code.py:make", "data"),
        ("left", "code.py:make", None),
        (".", "code.py:make", "."),  # whatever stays behind
        (".", "", None),
        ("../elsewhere", "code.py:make", None),
    ],
)
def test_data_travels_if_all_of_it_is_sent(tmp_path, path, source, expected):
    root = tmp_path / "job"
    for name in ("data/train.csv", "left/train.csv", "../elsewhere/train.csv", "train.csv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("y\n1\n")
    (root / "code.py").write_text("")
    (root / ".heterpsignore").write_text("left/\n/train.csv\nbig.arrow\n")
    job = JobSpec(directory=str(root))
    job.model.entry, job.data.path, job.data.train = "code.py:make", path, "train.csv"
    job.data.source = source
    if path == "mixed":
        for name in ("mixed/train.csv/state.json", "mixed/train.csv/big.arrow", "mixed/valid.csv"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("x")
        job.data.valid = "valid.csv"
    settle(job, pack(root, 1 << 20))
    assert job.data.path == (expected or os.path.normpath(root / path))
