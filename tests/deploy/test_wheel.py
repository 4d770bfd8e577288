"""A wheel is whole: installed into an environment of its own, it runs outside of the repository."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("heterps", "scheduler", "workers", "ps", "chassis", "protos")
SOURCES = {".cc", ".h", ".txt"}  # what built the native modules
SHARDS = """
import numpy as np, ps
with ps.LocalShards(2) as shards, ps.ParameterClient(shards.addresses) as client:
    client.create_table("rows", dim=4, optimizer="sgd", learning_rate=1.0)
    keys = np.arange(100)
    before = client.pull("rows", keys)
    client.push("rows", keys, np.ones((100, 4), np.float32))
    assert np.array_equal(client.pull("rows", keys), before - 1)
print(ps.__file__)
"""

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    options = ["--wheel-dir", str(folder), f"--config-settings=build-dir={folder / 'build'}"]
    subprocess.run([*pip, *options, str(ROOT)], check=True, timeout=1200)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def outside(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment in `venv`: the wheel, over the packages that are here."""
    folder = tmp_path_factory.mktemp("outside")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "packages.pth").write_text("\n".join(here) + "\n")
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    # What is here counts as installed, the editable HeterPS too: install beside it.
    subprocess.run([*pip, "--ignore-installed", wheel], check=True, timeout=120)
    return folder


def run(folder: Path, program: str, *arguments: str) -> str:
    environment = {**os.environ, "HETERPS_HOME": str(folder / "home")}
    environment.pop("PYTHONPATH", None)
    argv = [str(folder / "venv/bin" / program), *arguments]
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_everything_that_is_no_native_source_is_in_it(wheel: Path) -> None:
    listed = ["git", "ls-files", "--", *PACKAGES]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {name for name in tracked.stdout.split() if Path(name).suffix not in SOURCES}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wanted <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {name for name in names if Path(name).suffix in SOURCES} == {
        name for name in names if name.endswith("dist-info/entry_points.txt")
    }


def test_a_wheel_of_python_3_12_is_for_later_ones_too(wheel: Path) -> None:
    tags = wheel.name.split("-")[2:4]
    current = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert tags == (["cp312", "abi3"] if sys.version_info >= (3, 12) else [current, current])


def test_it_says_its_version(outside: Path) -> None:
    assert "0.1.0" in run(outside, "heterps", "--version")


def test_it_plans(outside: Path) -> None:
    shutil.copytree(ROOT / "examples/plan", outside / "plan")
    files = ["plan/workload.yaml", "--resources", "plan/resources.yaml"]
    decision = json.loads(run(outside, "heterps", "plan", *files, "--json"))
    assert decision["feasible"]
    assert decision["method"] == "ppo"


def test_it_serves_rows(outside: Path) -> None:
    assert run(outside, "python", "-c", SHARDS).startswith(str(outside / "venv"))


def test_it_trains(outside: Path) -> None:
    shutil.copytree(ROOT / "examples/flights", outside / "examples/flights")
    settings = ["--set", "train.max_steps=20", "--set", f"output={outside / 'out'}"]
    run(outside, "heterps", "train", "examples/flights/job.yaml", *settings)
    assert list((outside / "out").rglob("*.safetensors"))
