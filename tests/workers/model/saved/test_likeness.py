"""Code that computes in another process what it computed in training, and code that does not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rounds import more

MODEL = """
import torch
from torch import nn

NAMES = "item", "price", "shop", "user", "place"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Linear(2, 3) for name in ORDER})
        self.head = nn.Linear(15, 1)

    def forward(self, dense):
        x = torch.cat([tower(dense) * SCALE for name, tower in self.towers.items()], 1)
        return {"late": self.head(x.tanh()).squeeze(1), "sum": x.sum(1)}
"""
PROCESS = """
import json, sys
from protos.job_pb2 import JobSpec
from workers.model.code.entry import job_model
from workers.model.saved.likeness import check_likeness, likeness

job = JobSpec(directory=sys.argv[1])
job.model.entry = "model.py:Net"
job.data.dense.extend(["a", "b"])
if len(sys.argv) < 3:
    print(json.dumps(likeness(job_model(job), job)))
else:
    job.train.seed = 5  # which its weights follow from, and nothing else
    check_likeness(job_model(job), job, json.loads(sys.argv[2]), "there")
"""


def run(folder: Path, seed: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROCESS, str(folder), *arguments],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        check=False,
    )


def written(folder: Path, order: str, scale: str) -> None:
    text = MODEL.replace("ORDER", order).replace("SCALE", scale)
    (folder / "model.py").write_text(text)


@pytest.mark.parametrize(
    ("order", "scale"),
    [
        ("NAMES", "(1 + hash(name) % 7)"),
        pytest.param("set(NAMES)", "1", marks=pytest.mark.exhaustive),
    ],
)
def test_what_follows_from_the_hash_of_text_is_refused_elsewhere(tmp_path, order, scale):
    written(tmp_path, order, scale)
    saved = run(tmp_path, 0).stdout
    assert run(tmp_path, 0, saved).returncode == 0
    failed = run(tmp_path, 1, saved)
    assert failed.returncode == 1
    assert "there: in this process the model's code computes something else" in failed.stderr
    assert "PYTHONHASHSEED=0" in failed.stderr


@pytest.mark.parametrize(
    ("order", "scale"),
    [
        ("sorted(set(NAMES))", "1"),
        pytest.param("NAMES", "(1 if name in set(NAMES) else 2)", marks=pytest.mark.exhaustive),
    ],
)
def test_what_does_not_is_taken(tmp_path, order, scale):
    written(tmp_path, order, scale)
    saved = run(tmp_path, 0).stdout
    assert {*json.loads(saved)} == {"['late']", "['sum']"}
    assert run(tmp_path, 1, saved).returncode == 0


DRAWN = "torch.rand((), generator=(g := torch.Generator(), g.seed())[0])"


@pytest.mark.parametrize("scale", [DRAWN, *more("float('inf')", "torch.ones(9)")])
def test_what_is_another_each_time_or_cannot_be_tried_tells_nothing(tmp_path, scale):
    written(tmp_path, "NAMES", scale)
    saved = run(tmp_path, 0).stdout
    assert json.loads(saved) == {}
    assert run(tmp_path, 1, saved).returncode == 0
