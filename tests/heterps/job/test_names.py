"""Jobs whose folder has modules of the names of our packages."""

import os
import subprocess
from pathlib import Path

import pytest

from chassis.rooms import ROOMS, ROOT
from heterps.job.file import JobFileError, load_job
from tests.installed import install

MODEL = """
from torch import nn

from heterps import SparseEmbedding
from scheduler import width


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = SparseEmbedding("rows", width(), learning_rate=0.05)
        self.tower = nn.Sequential(nn.Flatten(), nn.Linear(2 * width(), 1))

    def forward(self, sparse):
        return self.tower(self.embedding(sparse)).squeeze(-1)


def build():
    return Model()
"""
PREPARE = """
from pathlib import Path

import ps
import scheduler
import workers


def prepare(folder):
    assert (ps.MINE, workers.MINE, scheduler.width()) == (1, 1, 4)
    rows = "".join(f"{i % 7},{i % 11},{i % 2}\\n" for i in range(1024))
    Path(folder, "train.csv").write_text("a,b,y\\n" + rows)
"""
JOB = """\
name: tiny
model: {entry: model.py:build}
data: {path: rows, prepare: prepare.py:prepare, train: train.csv, label: y, sparse: [a, b]}
train: {epochs: 1, batch_size: 256, loss: bce_with_logits}
schedule: {resources: resources.yaml, workload: workload.yaml}
output: output
"""
COST = (
    "cost: {cpu: {compute_s: 1e-3, sync_s: 1e-4, transfer_s: 1e-4, parallel_compute: 0.9, "
    "parallel_sync: 0.5, memory_bytes: 1e6}}"
)
WORKLOAD = f"""\
name: tiny
reference_batch: 256
samples: 1024
ps_type: cpu
ps_core_s: 1.0e-9
layers:
  - {{name: embedding, kind: sparse_embedding, {COST}}}
  - {{name: tower, kind: dense, {COST}}}
"""
RESOURCES = "types: [{name: cpu, price_per_hour: 0.04, limit: 2, memory_bytes: 4.0e9}]\n"
TAKEN = "raise SystemExit('not this one')\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job beside modules of all six names, which uses its own where it may."""
    folder = tmp_path / "job"
    (folder / "rows").mkdir(parents=True)
    for name, text in (
        ("model.py", MODEL),
        ("prepare.py", PREPARE),
        ("job.yaml", JOB),
        ("workload.yaml", WORKLOAD),
        ("resources.yaml", RESOURCES),
        ("heterps.py", TAKEN),
        ("chassis.py", TAKEN),
        ("scheduler.py", "def width():\n    return 4\n"),
        ("workers/__init__.py", "MINE = 1\n"),
        ("ps.py", "MINE = 1\n"),
        ("protos/__init__.py", TAKEN),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder / "job.yaml"


def test_a_job_trains_beside_modules_of_all_six_names(job: Path, tmp_path: Path) -> None:
    """As installed from a wheel, from the job's folder; more such modules are on PYTHONPATH."""
    python, _ = install(tmp_path / "venv")
    (tmp_path / "library").mkdir()
    for room in ROOMS[1:]:  # no one can tell whose `heterps` the command itself would be
        (tmp_path / f"library/{room}.py").write_text(TAKEN)
    done = subprocess.run(
        [python, "-P", "-m", "heterps", "train", "job.yaml"],
        cwd=job.parent,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "library")},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(job.parent.glob("output/**/model.json")), done.stdout


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "scheduler"])
def test_a_module_that_a_worker_cannot_have_is_named_before_anything_starts(
    job: Path, room: str
) -> None:
    (job.parent / "parts.py").write_text(f"import {room}\n")
    (job.parent / "model.py").write_text("import parts\n" + MODEL.replace("from heterps", "# "))
    with pytest.raises(JobFileError) as raised:
        load_job(job)
    said = str(raised.value)
    assert f"model.entry: {job.parent / 'parts.py'}:1: imports {room!r} of its own" in said
    assert str(job.parent / room) in said
    assert str(ROOT / room) in said
    assert "rename yours" in said


def test_the_model_says_it_too_where_the_job_file_was_not_read_here(job: Path) -> None:
    """As on a node, which has the job from elsewhere, and where a saved model is loaded."""
    from workers.model.code.entry import ModelError, load_entry

    (job.parent / "model.py").write_text("import ps\n\ndef build():\n    return ps.MINE\n")
    with pytest.raises(ModelError, match=r"model.py:1: imports 'ps' of its own.*rename yours"):
        load_entry("model.py:build", job.parent, "model.entry")
