"""What fuzzing found stays mended, and every target still takes what it begins with."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import blocks
from tests.fuzz.replay import FINDINGS
from tests.fuzz.targets import ROOT, TARGETS


def test_every_input_is_taken_or_refused_within_its_bounds() -> None:
    # In a process of its own, whose memory is bounded.
    command = [sys.executable, "-m", "tests.fuzz.replay"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for name in TARGETS:
        assert f"{name}: " in done.stdout


def test_findings_belong_to_targets() -> None:
    assert {path.name for path in FINDINGS.iterdir()} <= {*TARGETS, blocks.NAME}


@pytest.mark.exhaustive
def test_findings_among_blocks_of_rows(tmp_path: Path) -> None:
    program = blocks.build(tmp_path, fuzzer=False)
    if program is None:
        pytest.skip("needs a C++ compiler")
    found = sorted((FINDINGS / blocks.NAME).iterdir())
    done = subprocess.run([program, *found], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
