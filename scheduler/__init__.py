"""The control plane: decides what runs where, starts it, follows it.

    decision = plan(load_workload("workload.yaml"), load_resources("resources.yaml"), 100_000)

Importing this package is cheap; what a name needs is imported when it is first used.
"""

from chassis.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "scheduler.decision.record": ("Decision",),
        "scheduler.methods.names": ("METHODS",),
        "scheduler.planning.explain": ("reasons",),
        "scheduler.planning.frontier": (
            "pareto",
            "pareto_of",
        ),
        "scheduler.planning.planner": ("plan",),
        "scheduler.planning.what_if": (
            "Comparison",
            "what_if",
        ),
        "scheduler.problem.fields": ("InputError",),
        "scheduler.problem.workload": (
            "Resources",
            "Workload",
            "load_resources",
            "load_workload",
        ),
    },
)
