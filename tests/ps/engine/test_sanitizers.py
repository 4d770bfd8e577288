"""The engine built with sanitizers, under several threads."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ROOT / "ps" / "engine"
FLAGS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitizer", FLAGS)
def test_threads_on_a_table(sanitizer: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    sources = [p for p in sorted(ENGINE.rglob("*.cc")) if p.parent.name != "bindings"]
    program = tmp_path / "stress"
    built = subprocess.run(
        [compiler, "-std=c++20", "-O1", "-g1", "-DHETERPS_PORTABLE", *FLAGS[sanitizer],
         f"-I{ENGINE}", *map(str, sources), str(ROOT / "tests/ps/engine/native/stress.cc"),
         "-pthread", "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "cannot find" in built.stderr and "san" in built.stderr:
        pytest.skip(f"the compiler lacks the {sanitizer} sanitizer")
    assert built.returncode == 0, built.stderr[-4000:]
    ran = subprocess.run(
        [str(program), str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
        env={"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
