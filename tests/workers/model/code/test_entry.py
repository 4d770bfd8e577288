"""Models that a job's entry builds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from protos.job_pb2 import JobSpec, ModelSpec
from workers.device.units import compute_environment
from workers.model.code.entry import ModelError, build_model, job_model

CODE = """
from torch import nn


class Tower(nn.Module):
    def __init__(self, name):
        super().__init__()
        setattr(self, name, nn.Linear(2, 2))


def build(name):
    return nn.Sequential(Tower(name))
"""


def job(folder: Path, **args: str) -> JobSpec:
    (folder / "model.py").write_text(CODE)
    made = JobSpec(directory=str(folder))
    made.model.entry = "model.py:build"
    made.model.args.update(args)
    return made


@pytest.mark.parametrize("name", ["half", "type"])
def test_a_layer_that_a_method_hides_is_refused_by_name(tmp_path, name):
    with pytest.raises(ModelError, match=rf"Tower\.{name} .*expected another, such as {name}_"):
        job_model(job(tmp_path, name=name))


DRAWING = """
import random

import numpy as np
import torch
from torch import nn

CONSTANT = torch.randn(2)


class Drawn(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("one", torch.from_numpy(np.random.normal(size=3)))
        self.register_buffer("other", torch.tensor([random.random(), *CONSTANT.tolist()]))
        self.inner = nn.Linear(random.randint(2, 9), 2)


def build():
    return Drawn()
"""


def test_a_model_is_the_same_in_every_process_whatever_it_draws_from(tmp_path):
    (tmp_path / "model.py").write_text(DRAWING)
    code = (
        "import sys; from pathlib import Path; from protos.job_pb2 import ModelSpec\n"
        "import numpy, random; numpy.random.seed(); random.seed()\n"
        "from workers.model.code.entry import build_model\n"
        "before = random.getstate(), str(numpy.random.get_state())\n"
        "spec, seed = ModelSpec(entry='model.py:build'), int(sys.argv[2])\n"
        "made = build_model(spec, Path(sys.argv[1]), seed)\n"
        "assert before == (random.getstate(), str(numpy.random.get_state()))\n"
        "print({name: value.tolist() for name, value in made.state_dict().items()})\n"
    )

    def made(seed: int) -> str:
        argv = [sys.executable, "-c", code, str(tmp_path), str(seed)]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    assert made(0) == made(0) != made(1)


IN_A_SET = """
from torch import nn

def build():
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in {"item", "price", "shop", "user"}})
"""


@pytest.mark.exhaustive
def test_a_model_made_in_the_order_of_a_set_is_the_same_in_every_process(tmp_path):
    (tmp_path / "model.py").write_text(IN_A_SET)
    code = (
        "import sys; from pathlib import Path; from protos.job_pb2 import ModelSpec\n"
        "from workers.model.code.entry import build_model\n"
        "made = build_model(ModelSpec(entry='model.py:build'), Path(sys.argv[1]), 0)\n"
        "print({name: value.tolist() for name, value in made.state_dict().items()})\n"
    )
    argv, found = [sys.executable, "-c", code, str(tmp_path)], []
    for seed in ("1", "2", "random"):  # of nodes
        environment = {**os.environ, "PYTHONHASHSEED": seed, **compute_environment()}
        ran = subprocess.run(argv, check=True, capture_output=True, text=True, env=environment)
        found.append(ran.stdout)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("made", ["script({})", "trace({}, torch.zeros(3, 2))"])
@pytest.mark.parametrize(("nested", "name"), [("{}", "'1'"), ("nn.Sequential({})", r"'1\.0'")])
def test_a_module_of_torchscript_is_refused_by_its_name(tmp_path, made, nested, name):
    scripted = nested.format(f"torch.jit.{made.format('nn.Linear(2, 2)')}")
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        f"def build():\n    return nn.Sequential(nn.Linear(2, 2), {scripted})\n"
    )
    with pytest.raises(ModelError, match=rf"{name} is a torch\.jit\.ScriptModule; expected"):
        build_model(ModelSpec(entry="model.py:build"), tmp_path, 0)


def test_other_names_are_taken(tmp_path):
    assert hasattr(job_model(job(tmp_path, name="half_"))[0], "half_")
