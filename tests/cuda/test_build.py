"""The CUDA sources compile wherever a toolkit is installed, GPU or not."""

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


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("source", SOURCES)
def test_compiles(source: Path, tmp_path: Path) -> None:
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ("80", "90a")]
    flags = [*targets, "-std=c++20", "-O2", "-Werror=all-warnings", f"-I{CUDA / 'include'}"]
    command = [str(NVCC), *flags, "-c", str(source), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_headers_know_nothing_of_torch_and_python() -> None:
    sources = [*(CUDA / "include").rglob("*.*"), *(CUDA / "src").iterdir()]
    assert sources
    for source in sources:
        text = source.read_text()
        assert not any(word in text for word in ("#include <torch", "nanobind", "Python.h")), source


def test_no_python_package_takes_the_name() -> None:
    assert not list(CUDA.rglob("*.py"))
