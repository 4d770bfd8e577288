"""The files of a model while it is being written."""

import json
import subprocess
import sys

import torch
from safetensors.torch import load_file

from chassis.written import MARK
from protos.job_pb2 import JobSpec
from workers.model.saved import SavedModel

KILLED = """
import os, sys
from pathlib import Path
from workers.model import saved

def save_file(tensors, path):
    Path(path).write_bytes(b"half")
    os._exit(9)

saved.save_file = save_file
saved.SavedModel(sys.argv[1]).write_stage(0, {})
"""


def test_nothing_stays_of_weights_whose_writer_was_killed(tmp_path):
    folder = tmp_path / "model"
    argv = [sys.executable, "-c", KILLED, str(folder)]
    assert subprocess.run(argv, check=False).returncode == 9
    model, weight = SavedModel(str(folder)), torch.arange(3.0)
    model.write_stage(0, {"weight": weight})
    assert model.finish(JobSpec(), 1, [0.5], {"steps": 1}) == str(folder)
    files = {one.name for one in folder.iterdir()}
    assert files == {MARK, "dense.safetensors", "loss.csv", "model.json"}
    assert torch.equal(load_file(folder / "dense.safetensors")["weight"], weight)
    assert json.loads((folder / "model.json").read_text())["steps"] == 1
