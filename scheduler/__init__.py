"""The control plane: decides what runs where, starts it, follows it.

    decision = plan(load_workload("workload.yaml"), load_resources("resources.yaml"), 100_000)

Importing this package is cheap; what a name needs is imported when it is first used.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))  # a script may lie beside a `chassis` of its own
try:
    from chassis.lazy import attach
except ModuleNotFoundError:
    raise ImportError(
        f"{sys.modules['chassis'].__file__}: imported as 'chassis', where HeterPS needs its own, "
        f"at {_ROOT / 'chassis'}; rename yours, or move it into a package of another name"
    ) from None
finally:
    del sys.path[0]

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "scheduler.decision.record": ("Decision",),
        "scheduler.methods.names": ("METHODS",),
        "scheduler.planning.explain": ("reasons",),
        "scheduler.planning.frontier": ("pareto", "pareto_of"),
        "scheduler.planning.planner": ("plan",),
        "scheduler.planning.what_if": ("Comparison", "what_if"),
        "scheduler.problem.fields": ("InputError",),
        "scheduler.problem.workload": ("Resources", "Workload", "load_resources", "load_workload"),
        "scheduler.simulation.forecast": ("Forecast", "forecast"),
        "scheduler.simulation.training": ("Outcome", "Training", "simulate"),
    },
)
