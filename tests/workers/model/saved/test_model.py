"""The files of a model while it is being written."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import heterps
from chassis.written import MARK
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import END_DISK_FULL
from ps.local.table import save_checkpoint
from workers.model.code.entry import ModelError, job_model
from workers.model.objective.curve import LossCurve
from workers.model.saved.model import SavedModel
from workers.model.saved.warm_start import read_weights
from workers.stage.report.failure import end_reason_of

KILLED = """
import os, sys
from workers.model.saved import model as saved

def chunks_of(tensors):
    yield b"half"
    os._exit(9)

saved.chunks_of = chunks_of
saved.SavedModel(sys.argv[1]).write_stage(0, {})
"""


def test_nothing_stays_of_weights_whose_writer_was_killed(tmp_path):
    folder = tmp_path / "model"
    argv = [sys.executable, "-c", KILLED, str(folder)]
    assert subprocess.run(argv, check=False).returncode == 9
    model, weight = SavedModel(str(folder)), torch.arange(3.0)
    model.write_stage(0, {"weight": weight})
    assert model.finish(JobSpec(), 1, LossCurve([0.5]), {"steps": 1}) == str(folder)
    files = {one.name for one in folder.iterdir()}
    assert files == {MARK, "dense.safetensors", "loss.csv", "model.json"}
    assert torch.equal(load_file(folder / "dense.safetensors")["weight"], weight)
    assert json.loads((folder / "model.json").read_text())["steps"] == 1


def test_a_later_attempt_takes_the_place_of_one_whose_end_nobody_heard(tmp_path):
    folder = tmp_path / "model"
    for attempt in (1, 2):
        model = SavedModel(str(folder), attempt)
        model.write_stage(0, {"weight": torch.full((3,), float(attempt))})
        (model.folder / f"of-{attempt}").touch()
        assert model.finish(JobSpec(), 1, LossCurve([0.5]), {"steps": attempt}) == str(folder)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    assert not (folder / "of-1").exists()
    assert load_file(folder / "dense.safetensors")["weight"].tolist() == [2.0] * 3
    assert json.loads((folder / "model.json").read_text())["steps"] == 2


def test_workers_that_were_given_up_take_nothing_from_those_that_go_on(tmp_path):
    before, after = (SavedModel(str(tmp_path / "model"), 1, generation) for generation in (0, 1))
    for model in (before, after):
        model.write_stage(0, {"weight": torch.zeros(3)})
    before.abandon()
    assert after.folder.is_dir()
    after.abandon()
    assert not after.folder.exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system, and not everywhere")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_found_first_and_blamed_and_nothing_is_left(small_disk):
    model = SavedModel(str(small_disk / "output/job"))
    model.require_room(1000)
    assert not list(small_disk.iterdir())
    for refused in (
        lambda: model.require_room(2 << 20),
        lambda: model.write_stage(0, {"weight": torch.zeros(1 << 19)}),
    ):
        with pytest.raises(OSError, match="No space left on device: a model of 2,097,152 by") as e:
            refused()
        assert end_reason_of(e.value) == END_DISK_FULL
        assert str(model.final) in str(e.value)
        assert not list(small_disk.iterdir())
    model.write_stage(0, {"weight": torch.zeros(1 << 17)})  # half of it is there
    with pytest.raises(OSError, match="No space left") as full:
        model.finish(JobSpec(), 1, LossCurve([0.5] * 100_000), {})
    assert end_reason_of(full.value) == END_DISK_FULL
    SavedModel(str(model.final), attempt=2).abandon()  # the folder is not that one's
    assert model.folder.is_dir()
    model.abandon()
    assert not list((small_disk / "output").iterdir())


def saved_with_code(folder, output, width=3):
    """A model whose code was not sent, as of `heterps train`; the job's folder."""
    folder.mkdir()
    (folder / "sizes").mkdir()
    (folder / "sizes/width.py").write_text(f"WIDTH = {width}\n")
    (folder / "unused.py").write_text("")
    (folder / "names.txt").write_text("a b")
    (folder / "model.py").write_text(
        "from pathlib import Path\n"
        "from torch import nn\n"
        "from sizes.width import WIDTH\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self, file=''):\n"
        "        super().__init__(WIDTH, 1)\n"
        "        self.names = Path(__file__).with_name(file).read_text() if file else ''\n"
    )
    job = JobSpec(directory=str(folder))
    job.model.entry = "model.py:Net"
    sys.path.insert(0, str(folder))
    try:
        model = job_model(job)
    finally:
        sys.path.remove(str(folder))
    saved = SavedModel(str(output))
    saved.write_stage(0, model.state_dict())
    save_checkpoint(saved.tables, [])
    saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})
    return model


def test_a_model_whose_rows_were_not_saved_does_not_make_its_own(tmp_path):
    (tmp_path / "model.py").write_text(
        "from heterps import SparseEmbedding\ndef build():\n    return SparseEmbedding('a', 2)\n"
    )
    job = JobSpec(directory=str(tmp_path))
    job.model.entry = "model.py:build"
    saved = SavedModel(str(tmp_path / "out"))
    saved.write_stage(0, {})
    save_checkpoint(saved.tables, [])
    saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})
    with pytest.raises(RuntimeError, match="no rows for table 'a'"):
        heterps.load(tmp_path / "out")(torch.tensor([1, 2]))


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "sizes"]:
        del sys.modules[name]


def test_a_model_opens_without_its_jobs_folder(tmp_path):
    folder, output = tmp_path / "job", tmp_path / "out"
    model = saved_with_code(folder, output)
    forget()
    names = sorted(str(one.relative_to(output)) for one in output.rglob("*.py"))
    assert names == ["code/model.py", "code/sizes/width.py"]
    x = torch.randn(2, 3)
    shutil.move(folder, tmp_path / "away")
    assert torch.equal(heterps.load(output)(x), model(x))
    forget()
    shutil.move(output, tmp_path / "moved")
    assert torch.equal(heterps.load(tmp_path / "moved")(x), model(x))
    forget()


@pytest.mark.parametrize("name", ["model.json", "dense.safetensors"])
def test_a_flipped_bit_is_found_by_whoever_reads_the_model(tmp_path, name):
    saved_with_code(tmp_path / "job", tmp_path / "out")
    forget()
    path = tmp_path / "out" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if name == "model.json" else -3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"{name}: .*it was damaged"):
        heterps.load(tmp_path / "out")
    with pytest.raises(ModelError, match=f"{name}: .*it was damaged"):
        read_weights(str(tmp_path / "out"))


def test_two_models_have_modules_of_their_own(tmp_path):
    """Helper modules of the same name, as of two versions of one job."""
    for width, name in ((3, "a"), (5, "b")):
        saved_with_code(tmp_path / name, tmp_path / f"{name}-out", width)
        forget()
    for name, width in (("a", 3), ("b", 5), ("a", 3)):
        assert heterps.load(tmp_path / f"{name}-out").in_features == width
    forget()


def test_code_that_was_changed_after_training_does_not_count(tmp_path):
    folder, output = tmp_path / "job", tmp_path / "out"
    model = saved_with_code(folder, output)
    forget()
    (folder / "sizes/width.py").write_text("WIDTH = 4\n")
    x = torch.randn(2, 3)
    assert torch.equal(heterps.load(output)(x), model(x))
    forget()


def test_unchanged_code_finds_what_it_reads_in_its_own_folder(tmp_path):
    folder, output = tmp_path / "job", tmp_path / "out"
    saved_with_code(folder, output)
    forget()
    facts = json.loads((output / "model.json").read_text())
    facts["job"]["model"]["args"] = {"file": "names.txt"}
    (output / "model.json").write_text(json.dumps(facts))
    assert heterps.load(output).names == "a b"
    forget()
    shutil.rmtree(folder)
    with pytest.raises(ModelError, match=r"names\.txt"):
        heterps.load(output)
    forget()
