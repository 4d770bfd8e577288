"""The benchmark of the mixture of experts: its numbers first, and a quick run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import moe, moe_contestants

ROOT = Path(__file__).resolve().parents[2]
SMALL = moe.Shape("small", T=24, H=16, I=8, E=8, k=2)


@pytest.mark.parametrize("routing", moe.ROUTINGS)
@pytest.mark.parametrize("prototypes", [False, True])
def test_contestants_agree(routing: str, prototypes: bool) -> None:
    shape = moe.Shape("small", T=24, H=16, I=8, E=8, k=2, prototypes=prototypes)
    problem = moe.problem_of(shape, routing, torch.float32, "cpu")
    exact = moe_contestants.Exact(problem).check(0)
    for name in ("heterps", "loop", "grouped_mm"):
        assert moe.worst_difference(moe_contestants.ALL[name](problem), exact) < 1e-9, name


def test_a_wrong_contestant_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(moe_contestants.Loop):
        def layer(self, x: torch.Tensor) -> torch.Tensor:
            return super().layer(x) * 1.01

    monkeypatch.setitem(moe_contestants.ALL, "wrong", Wrong)
    rows = moe.rows_of(SMALL, "uniform", torch.float32, "cpu", turns=1, clock="wall")
    wrong = next(row for row in rows if row["contestant"] == "wrong")
    assert wrong["skipped"].startswith("differs by")
    assert "forward_ms" not in wrong
    assert next(row for row in rows if row["contestant"] == "heterps")["both_times_loop"] > 0


def test_runs() -> None:
    options = ["--shapes=D/32", "--turns=1", "--threads=1", "--no-write"]
    done = subprocess.run(
        [sys.executable, "bench/moe.py", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for routing in moe.ROUTINGS:
        assert f"| D/32 | {routing} | heterps | " in done.stdout
    assert "differs" not in done.stdout
