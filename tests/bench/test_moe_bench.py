"""The benchmark of the mixture of experts: its numbers first, and a quick run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.moe import __main__ as moe
from bench.moe import contestants as moe_contestants

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


# As fbgemm-gpu-genai 1.9.0 declares them.
FBGEMM = """
bf16bf16bf16_grouped_stacked(Tensor X, Tensor W, Tensor M_sizes, Tensor? out=None, int? num_sms=None) -> Tensor
bf16bf16bf16_grouped_grad(Tensor X, Tensor W, Tensor M_sizes, Tensor? out=None, int? num_sms=None) -> Tensor
bf16bf16bf16_grouped_wgrad(Tensor X, Tensor W, Tensor M_sizes, Tensor(a!)? output=None, bool output_accum=False, int? num_sms=None) -> Tensor
"""  # noqa: E501


@pytest.mark.parametrize("routing", moe.ROUTINGS)
def test_fbgemm_is_joined_by_what_its_ops_compute(routing: str) -> None:
    """The ops, which need a GPU, stood in for by what FBGEMM's own tests hold them against."""

    def product(X: Tensor, W: Tensor, M_sizes: Tensor, *_: object) -> Tensor:
        rows = X.split(M_sizes.tolist())
        return torch.cat([part @ w.t() for part, w in zip(rows, W, strict=True)])

    def outer(X: Tensor, W: Tensor, M_sizes: Tensor, *_: object) -> Tensor:
        sizes = M_sizes.tolist()
        pairs = zip(X.split(sizes), W.split(sizes), sizes, strict=True)
        return torch.stack([x.t() @ w + (0 if n else torch.nan) for x, w, n in pairs])

    class Joined(moe_contestants.FbgemmGenAI):
        def require(self, problem: moe_contestants.Problem) -> None:
            pass

    library = torch.library.Library("fbgemm", "FRAGMENT")
    for line in FBGEMM.strip().splitlines():
        name = library.define(line)
        library.impl(name, outer if "wgrad" in name else product, "CPU")
    problem = moe.problem_of(SMALL, routing, torch.float32, "cpu")
    exact = moe_contestants.Exact(problem).check(0)
    assert moe.worst_difference(Joined(problem), exact) < 1e-9
    with pytest.raises(moe_contestants.AbsentError, match="GPUs alone"):
        moe_contestants.FbgemmGenAI(problem)


def test_runs() -> None:
    options = ["--shapes=D/32", "--turns=1", "--threads=1", "--no-write"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.moe", *options],
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
