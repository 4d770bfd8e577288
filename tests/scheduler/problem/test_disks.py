"""Experts out of memory: a type whose disk does not hold them runs none of their layers."""

from typing import Any

import pytest

from scheduler import plan


def workload(disk: float = 0.0) -> dict[str, Any]:
    """Two layers, of which both have experts on disk, on a cheap type and a dear one."""
    cost = {
        name: {
            "compute_s": 0.01,
            "sync_s": 0.001,
            "transfer_s": 0.001,
            "parallel_compute": 0.9,
            "parallel_sync": 0.5,
            "memory_bytes": 1e6,
        }
        for name in ("cheap", "dear")
    }
    more = {"disk_bytes": disk} if disk else {}
    layers = [{"name": name, "kind": "moe", "cost": cost, **more} for name in ("one", "two")]
    return {"name": "disks", "reference_batch": 32, "samples": 1e6, "layers": layers}


def resources(cheap: float = 0.0, dear: float = 0.0) -> dict[str, Any]:
    types = [
        {"name": "cheap", "price_per_hour": 0.1, "limit": 4, "memory_bytes": 1e9},
        {"name": "dear", "price_per_hour": 1.0, "limit": 4, "memory_bytes": 1e9},
    ]
    for kind, size in zip(types, (cheap, dear), strict=True):
        if size:
            kind["ssd_bytes"] = size
    return {"types": types}


def test_a_type_without_room_for_all_runs_none() -> None:
    def assigned(disk: float, *ssd: float) -> set[str]:
        decision = plan(workload(disk), resources(*ssd), min_throughput=100, method="exact")
        assert decision.feasible, decision.plan.reason
        return set(decision.assignment)

    assert assigned(0.0) == assigned(1e9) == assigned(0.0, 1.0) == {"cheap"}
    assert assigned(1e9, 2e9) == {"cheap"}
    assert assigned(1e9, 1.9e9) == assigned(1e9, 1.9e9, 2e9) == {"dear"}


@pytest.mark.parametrize("method", ["exact", "greedy"])
def test_none_with_room_is_told(method: str) -> None:
    decision = plan(workload(1e9), resources(1e9, 1.5e9), min_throughput=100, method=method)
    assert not decision.feasible
    assert "experts out of memory take 2e+09 bytes of disk" in decision.plan.reason
    assert "has 1.5e+09 at most (ssd_bytes)" in decision.plan.reason
