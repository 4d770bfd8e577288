from scheduler.decision.record import Decision as Decision
from scheduler.methods.names import METHODS as METHODS
from scheduler.planning.explain import reasons as reasons
from scheduler.planning.frontier import pareto as pareto
from scheduler.planning.frontier import pareto_of as pareto_of
from scheduler.planning.planner import plan as plan
from scheduler.planning.what_if import Comparison as Comparison
from scheduler.planning.what_if import what_if as what_if
from scheduler.problem.fields import InputError as InputError
from scheduler.problem.workload import Resources as Resources
from scheduler.problem.workload import Workload as Workload
from scheduler.problem.workload import load_resources as load_resources
from scheduler.problem.workload import load_workload as load_workload
from scheduler.simulation.forecast import Forecast as Forecast
from scheduler.simulation.forecast import forecast as forecast
from scheduler.simulation.training import Outcome as Outcome
from scheduler.simulation.training import Training as Training
from scheduler.simulation.training import simulate as simulate

__all__ = [
    "Comparison",
    "Decision",
    "Forecast",
    "InputError",
    "METHODS",
    "Outcome",
    "Resources",
    "Training",
    "Workload",
    "forecast",
    "load_resources",
    "load_workload",
    "pareto",
    "pareto_of",
    "plan",
    "reasons",
    "simulate",
    "what_if",
]
