"""Whoever sums with a worker that goes away is told, at whatever moment it goes: real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rounds import more

RANKS = Path(__file__).with_name("ring_ranks.py")
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "case",
    [
        ("kill,stop,raise", 3, 0),
        *more(*(("kill", width, seed) for width in (2, 3, 5) for seed in range(1, 6))),
        *more(("raise,kill,stop", 5, 1)),
    ],
    ids=str,
)
def test_all_others_are_told_and_no_sum_is_wrong(tmp_path, case):
    how, width, seed = case
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(RANKS), str(tmp_path), str(width), str(seed), how],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for victim in range(width):
        told = {
            rank: (tmp_path / f"{victim}-{rank}").read_text()
            for rank in range(width)
            if rank != victim
        }
        assert set(told.values()) == {"lost"}, told
