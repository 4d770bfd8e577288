"""Models that a job's entry builds."""

from pathlib import Path

import pytest

from protos.job_pb2 import JobSpec
from workers.model.code.entry import ModelError, job_model

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


def test_other_names_are_taken(tmp_path):
    assert hasattr(job_model(job(tmp_path, name="half_"))[0], "half_")
