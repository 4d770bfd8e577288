"""The index of a table, with places of all sizes."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "ps" / "engine"


def test_the_index_finds_each_place_and_hardly_any_other(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "index"
    sources = [ENGINE / "table" / "index.cc", ENGINE / "table" / "arena.cc"]
    built = subprocess.run(
        [compiler, "-std=c++20", "-O1", "-DHETERPS_PORTABLE", f"-I{ENGINE}", *map(str, sources),
         str(ROOT / "tests/ps/engine/native/index.cc"), "-pthread", "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-4000:]
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
