"""The CUDA sources compile wherever a toolkit is installed, GPU or not."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "cuda"
SOURCES = [  # one of them always
    pytest.param(path, marks=() if path.stem == "route" else pytest.mark.exhaustive, id=path.name)
    for path in sorted((CUDA / "src").glob("*.cu"))
]
# Debian and the toolkit's own installer do not agree where it goes.
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def targets() -> list[str]:
    """What CMakeLists.txt compiles for, as nvcc is told."""
    text = (CUDA / "CMakeLists.txt").read_text()
    version = subprocess.run([str(NVCC), "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"release (\d+)\.(\d+)", version.stdout)
    assert release is not None
    lists = ["HETERPS_CUDA_TARGETS"]
    if tuple(map(int, release.groups())) >= (12, 8):
        lists.append("HETERPS_CUDA_TARGETS_SINCE_12_8")
    names = [
        name for each in lists for name in re.findall(rf'set\({each} "(.*)"\)', text)[0].split(";")
    ]
    assert "80-real" in names
    flags = []
    for name in names:
        number, _, real = name.partition("-")
        code = f"sm_{number}" if real else f"[sm_{number},compute_{number}]"
        flags.append(f"-gencode=arch=compute_{number},code={code}")
    return flags


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("source", SOURCES)
def test_compiles(source: Path, tmp_path: Path) -> None:
    flags = [*targets(), "-std=c++20", "-O2", "-Werror=all-warnings", f"-I{CUDA / 'include'}"]
    command = [str(NVCC), *flags, "-c", str(source), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_headers_know_nothing_of_torch_and_python() -> None:
    sources = [
        path for room in ("include", "src") for path in (CUDA / room).rglob("*.*") if path.is_file()
    ]
    assert sources
    for source in sources:
        text = source.read_text()
        assert not any(word in text for word in ("#include <torch", "nanobind", "Python.h")), source


def test_no_python_package_takes_the_name() -> None:
    assert not list(CUDA.rglob("*.py"))
