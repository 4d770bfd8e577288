"""Experts split over 2, 4 and 8 processes give what one process gives; when shadowing pays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.rounds import more
from workers.moe.group import Rates
from workers.moe.shadowing import ExpertCost, decide, latency

RANKS = Path(__file__).with_name("expert_parallel_ranks.py")
ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = 1e-9
COST = ExpertCost(flops=100.0, weight_bytes=1000.0, row_bytes=10.0)


def errors(folder, world):
    """The largest error of each case over all ranks."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, str(RANKS), str(folder), str(world)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, float] = {}
    for rank in range(world):
        for name, error in json.loads((folder / f"{rank}.json").read_text()).items():
            found[name] = max(found.get(name, 0.0), error)
    return found


@pytest.mark.parametrize("world", [4, *more(8)])
def test_split_equals_whole(tmp_path, world):
    found = errors(tmp_path, world)
    assert len(found) == (world.bit_length() - 1) * 23 + 1
    assert {name: e for name, e in found.items() if not e <= TOLERANCE} == {}


def test_latency_follows_the_model():
    # Two processes with two experts each; rows of process 0, then of process 1.
    counts = torch.tensor([[4, 0, 6, 0], [2, 1, 3, 5]])
    by = Rates(flops_per_s=200.0, bytes_per_s=40.0)
    # Computed are 7 and 14 rows; 0 sends 6 and receives 3.
    expected = 3 * 100 * 14 / 200 + 4 * 10 * 6 / 40
    assert latency(counts, [0, 2, 4], (), COST, by) == pytest.approx(expected)
    # Expert 2 at home: 0 computes 4 + 2 + 1 + 6, 1 computes 5 + 3; 1 sends 3.
    expected = 3 * 100 * 13 / 200 + 4 * 10 * 3 / 40 + 2 * 1000 / 40
    assert latency(counts, [0, 2, 4], [2], COST, by) == pytest.approx(expected)


def test_popular_experts_are_shadowed_while_it_pays():
    even = torch.full((4, 4), 25)
    skewed = torch.tensor([[70, 10, 10, 10]] * 4)
    bounds = [0, 1, 2, 3, 4]
    fast, slow = Rates(1e3, 1e6), Rates(1e3, 1e1)
    assert decide(skewed, bounds, COST, fast).experts == (0,)
    large = ExpertCost(flops=100.0, weight_bytes=1e4, row_bytes=10.0)
    assert decide(skewed, bounds, large, fast).experts == (0,)
    assert decide(skewed, bounds, large, slow).experts == ()
    decision = decide(skewed, bounds, COST, fast)
    assert decision.seconds < decision.seconds_without
    pair = torch.tensor([[40, 40, 10, 10]] * 4)  # either alone would leave the other
    assert decide(pair, bounds, COST, fast).experts == (0, 1)
    assert decide(even, bounds, ExpertCost(100.0, 1e9, 10.0), fast).experts == ()
