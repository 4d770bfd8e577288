"""The control plane: decides what runs where, starts it, follows it.

    decision = plan(load_workload("workload.yaml"), load_resources("resources.yaml"), 100_000)

Importing this package is cheap; what a name needs is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler.comparison import Comparison, what_if
    from scheduler.decision import Decision
    from scheduler.explain import reasons
    from scheduler.fields import InputError
    from scheduler.frontier import pareto, pareto_of
    from scheduler.methods import METHODS
    from scheduler.planning import plan
    from scheduler.workload import Resources, Workload, load_resources, load_workload

_HOMES = {
    "METHODS": "methods",
    "Comparison": "comparison",
    "Decision": "decision",
    "InputError": "fields",
    "Resources": "workload",
    "Workload": "workload",
    "load_resources": "workload",
    "load_workload": "workload",
    "pareto": "frontier",
    "pareto_of": "frontier",
    "plan": "planning",
    "reasons": "explain",
    "what_if": "comparison",
}

__all__ = [
    "METHODS",
    "Comparison",
    "Decision",
    "InputError",
    "Resources",
    "Workload",
    "load_resources",
    "load_workload",
    "pareto",
    "pareto_of",
    "plan",
    "reasons",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
