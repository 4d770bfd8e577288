"""`make bench-gpu`, all its stages on an emulated GPU."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import report

ROOT = Path(__file__).parents[2]


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result["stages"]["moe"]["moe"]["rows"]
    return rows


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_every_stage_runs_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--emulated", "--into", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False
    )
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0, json.dumps(result["stages"], indent=1)[-6000:] + done.stderr
    assert result["emulated"] is True
    assert list(result["stages"]) == ["build", "train", "moe", "test"]
    assert "There was no GPU" in (tmp_path / "gpu_benchmark.md").read_text()
    for job in ("flights", "moe_lm"):
        assert result["stages"]["train"]["parts"][job]["state"] == "succeeded"
    measured = [row for row in rows_of(result) if "skipped" not in row]
    assert {row["contestant"] for row in measured} >= {"heterps", "loop", "bmm bound"}
    assert {row["shape"][0] for row in measured} == set("ABCDE")
    assert all(row["difference"] < 1e-4 for row in measured if row["contestant"] == "heterps")


def test_a_stage_that_fails_is_on_the_page(tmp_path: Path) -> None:
    failed = {"status": "failed", "seconds": 3.0, "says": "no nvcc"}
    result = {
        "emulated": False,
        "device": "a GPU",
        "machine": {"processor": "a CPU", "cores": 2},
        "versions": {"python": "3"},
        "date": "today",
        "stages": {"build": {"status": "failed", "seconds": 3.0, "parts": {"ops": failed}}},
    }
    page = report.write_page(result, tmp_path).read_text()
    assert "| build | ops | failed | 3 |" in page
    assert "There was no GPU" not in page


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, "-m", "bench.gpu"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2
    assert "an NVIDIA GPU, of Ampere or later" in done.stderr
    assert (torch.version.cuda is None) == ("a torch with CUDA" in done.stderr)
    assert "--emulated runs every stage without" in done.stderr
