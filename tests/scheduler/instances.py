"""Problems to plan: random small ones, and the example."""

from itertools import product
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from scheduler.problem.cost import CostModel
from scheduler.problem.plan import Plan
from scheduler.problem.workload import Resources, Workload

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan"


def cost(compute_s: float, **other: float) -> dict[str, float]:
    """A layer's cost that parallelises in full and communicates nothing, but for `other`."""
    base = {"sync_s": 0.0, "transfer_s": 0.0, "parallel_compute": 1.0, "parallel_sync": 1.0}
    return {"compute_s": compute_s, **base, "memory_bytes": 0.0, **other}


def workload(*layers: dict[str, Any], **other: Any) -> dict[str, Any]:
    """A workload file of layers l0, l1, .. given by their costs."""
    return {
        "name": "test",
        "reference_batch": 100,
        "samples": 3.6e6,
        "ps_type": "cpu",
        "ps_core_s": 0.0,
        "layers": [
            {"name": f"l{n}", "kind": "dense", "cost": layer} for n, layer in enumerate(layers)
        ],
        **other,
    }


def resources(**types: tuple[float, int]) -> dict[str, Any]:
    """A resources file from name=(price, limit)."""
    return {
        "types": [
            {"name": name, "price_per_hour": price, "limit": limit, "memory_bytes": 100.0}
            for name, (price, limit) in types.items()
        ]
    }


def model(work: dict[str, Any], offer: dict[str, Any], pin: Any = None) -> CostModel:
    """The cost model of two files."""
    return CostModel(Workload.parse(work), Resources.parse(offer), pin)


def every_plan(problem: CostModel, assignment: tuple[int, ...], floor: float) -> list[Plan]:
    """All plans of an assignment, by trying every number of units of every stage."""
    runs = problem.runs(assignment)
    ranges = [range(1, int(problem.limit[run.type]) + 1) for run in runs]
    return [problem.evaluate(assignment, units, floor) for units in product(*ranges)]


TYPES = ("cpu", "t4", "v100")


@st.composite
def problems(draw: st.DrawFn, layers: int = 4, limit: int = 5) -> tuple[CostModel, float]:
    """A random small problem and a floor: layers barred from types, memory, PS cores, limits."""
    names = TYPES[: draw(st.integers(1, 3))]
    seconds = st.floats(0.001, 1.0)
    fraction = st.sampled_from([0.0, 0.5, 0.9, 1.0])
    rows = []
    for _ in range(draw(st.integers(1, layers))):
        able = draw(st.sets(st.sampled_from(names), min_size=1))
        rows.append(
            {
                name: {
                    "compute_s": draw(seconds),
                    "sync_s": draw(st.sampled_from([0.0, 0.01, 0.3])),
                    "transfer_s": draw(st.sampled_from([0.0, 0.02, 0.4])),
                    "parallel_compute": draw(fraction),
                    "parallel_sync": draw(fraction),
                    "memory_bytes": draw(st.sampled_from([0.0, 40.0, 60.0])),
                    "delay_s": draw(st.sampled_from([0.0, 0.0, 0.3])),
                    "fixed_s": draw(st.sampled_from([0.0, 0.0, 0.2])),
                }
                for name in sorted(able)
            }
        )
    offer = {
        name: (draw(st.sampled_from([0.05, 0.4, 2.5])), draw(st.integers(1, limit)))
        for name in names
    }
    ps_core_s = draw(st.sampled_from([0.0, 0.0, 1e-4, 3e-3]))
    floor = draw(st.sampled_from([0.0, 30.0, 200.0, 1000.0]))
    return model(workload(*rows, ps_core_s=ps_core_s), resources(**offer)), floor
