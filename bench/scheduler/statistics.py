"""What rows of the scheduler's benchmark come to."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def quantiles(values: Sequence[float | None]) -> dict[str, float]:
    """Mean, median, 95th percentile and the largest of those that are known."""
    finite = np.array([v for v in values if v is not None])
    if not finite.size:
        return {}
    return {
        "mean": float(finite.mean()),
        "p50": float(np.percentile(finite, 50)),
        "p95": float(np.percentile(finite, 95)),
        "worst": float(finite.max()),
    }


def gaps(rows: Sequence[Row]) -> dict[str, Any]:
    """Gaps to the bound, and how often there is no plan though one exists."""
    missed = sum(1 for row in rows if row["cost"] is None and row["exact"] is not None)
    proven = sum(1 for row in rows if row["proven"])
    loose = [row["exact"] / row["bound"] - 1 for row in rows if row["exact"] and row["bound"]]
    return {
        "problems": len(rows),
        "infeasible_where_a_plan_exists": missed,
        "gap": quantiles([row["gap"] for row in rows]),
        "proven": proven,
        "exact_gap": quantiles(loose),
    }


def grouped(rows: Sequence[Row], key: str | Callable[[Row], str]) -> dict[str, list[Row]]:
    """Rows by a value of theirs, in the order of appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key] if isinstance(key, str) else key(row), []).append(row)
    return groups


def size_of(row: Row) -> str:
    """The bucket of layers that a problem is in."""
    for most in (8, 16, 32, 64):
        if row["layers"] <= most:
            return f"to {most}"
    return "above 64"


def against(rows: Sequence[Row]) -> dict[str, Any]:
    """One rival against ppo: costs relative to it where both have a plan, and who wins."""
    both = [row for row in rows if row["cost"] is not None and row["ppo"] is not None]
    ratios = [row["cost"] / row["ppo"] for row in both]
    return {
        "problems": len(rows),
        "feasible": sum(1 for row in rows if row["cost"] is not None),
        "gap": quantiles([row["gap"] for row in rows]),
        "ppo_gap": quantiles([row["ppo_gap"] for row in rows]),
        "cost_to_ppo": math.exp(float(np.mean(np.log(ratios)))) if ratios else None,
        "dearer": sum(1 for ratio in ratios if ratio > 1 + 1e-9),
        "same": sum(1 for ratio in ratios if abs(ratio - 1) <= 1e-9),
        "cheaper": sum(1 for ratio in ratios if ratio < 1 - 1e-9),
        "seconds": quantiles([row["seconds"] for row in rows]),
        "evaluations": quantiles([row["evaluations"] for row in rows]).get("p50", 0),
    }
