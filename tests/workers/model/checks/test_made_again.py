"""Models that are others each time they are built, and models that only look so."""

import sys
from pathlib import Path

import numpy as np
import pytest

from chassis.entries import imported
from protos.job_pb2 import JobSpec
from workers.model.code.entry import ModelError, job_model
from workers.profiling.look import look

CODE = """
import itertools, os, random, secrets, time

import numpy as np
import torch
from torch import nn

import made_beside

GENERATOR, COUNT = np.random.default_rng(0), itertools.count()


class Scaled(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x * self.by


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.last = nn.Linear(3, 1)
        self.scaled = Scaled(ATTRIBUTE)
        VALUE = PARAMETER
        with torch.no_grad():
            self.last.bias.fill_(VALUE)

    def forward(self, dense):
        return self.last(self.scaled(torch.tanh(self.first(dense)))).squeeze(1)
"""


def job_in(folder: Path, parameter: str, attribute: str) -> JobSpec:
    text = CODE.replace("PARAMETER", parameter).replace("ATTRIBUTE", attribute)
    (folder / "model.py").write_text(text)
    (folder / "made_beside.py").write_text("import itertools\nCOUNT = itertools.count()\n")
    draws = np.random.default_rng(0).normal(size=(30, 2))
    rows = (f"{index % 2},{a:.3f},{b:.3f}\n" for index, (a, b) in enumerate(draws))
    (folder / "train.csv").write_text("y,a,b\n" + "".join(rows))
    job = JobSpec(directory=str(folder))
    job.model.entry = "model.py:Net"
    job.data.train, job.data.label, job.train.loss = "train.csv", "y", "bce_with_logits"
    job.data.dense.extend(["a", "b"])
    job.train.batch_size, job.train.optimizer.name = 10, "sgd"
    return job


DRAWN = [
    "int.from_bytes(os.urandom(2), 'big') / 65536",
    "random.SystemRandom().random()",
    "random.Random().random()",
    "secrets.randbelow(1000) / 1000",
    "float(np.random.default_rng().random())",
    "(torch.seed(), float(torch.rand(())))[1]",
    "float(torch.rand((), generator=(g := torch.Generator(), g.seed())[0]))",
    "time.perf_counter() % 1",
]


@pytest.mark.parametrize("drawn", DRAWN)
def test_one_of_other_parameters_each_time_is_refused(tmp_path, drawn):
    with pytest.raises(ModelError, match=r"model\.py:Net: 'last\.bias' is another one each time"):
        look(job_in(tmp_path, drawn, "1.0"))


@pytest.mark.parametrize("drawn", [DRAWN[1], DRAWN[6].replace("(()", "(3").replace("float", "")])
def test_one_that_predicts_something_else_each_time_is_refused(tmp_path, drawn):
    with pytest.raises(ModelError, match="of the same parameters the model predicts something els"):
        look(job_in(tmp_path, "0.0", drawn))


@pytest.mark.parametrize(
    "drawn",
    [
        "random.random()",
        "np.random.rand()",
        "float(torch.rand(()))",
        "GENERATOR.random()",  # begun as the file is imported, as in each process
        "next(COUNT)",
        "next(made_beside.COUNT)",
        "(setattr(self, 'made_at', time.time()), setattr(self, 'name', secrets.token_hex()), 0)[2]",
    ],
)
def test_what_is_the_same_in_each_process_is_taken(tmp_path, drawn):
    job = job_in(tmp_path, drawn, drawn)
    look(job)
    path = str(tmp_path / "model.py")
    (module,) = {one for one in imported() if getattr(one, "__file__", None) == path}
    assert type(job_model(job)) is module.Net, "the modules are those of before"


def test_code_that_is_imported_but_once_is_taken(tmp_path):
    job = job_in(tmp_path, "0.0", "1.0")
    once = "import sys\nassert not hasattr(sys, 'imported_here'), 'once'\nsys.imported_here = 1\n"
    (tmp_path / "made_beside.py").write_text(once)
    try:
        look(job)
    finally:
        del sys.imported_here
