"""Placements by simple rules, as plans; the provisioning of single assignments, remembered."""

from collections.abc import Sequence

from scheduler import rivals
from scheduler.cost import CostModel, Plan
from scheduler.provision import provision
from scheduler.rivals import Budget, Problem


class Evaluator:
    """Provisions assignments for one model and floor, each only once."""

    def __init__(self, model: CostModel, floor: float = 0.0) -> None:
        self.model = model
        self.floor = floor
        self._plans: dict[tuple[int, ...], Plan] = {}

    @property
    def evaluations(self) -> int:
        """Distinct assignments provisioned so far."""
        return len(self._plans)

    def __call__(self, assignment: Sequence[int]) -> Plan:
        """Return the cheapest plan of `assignment` (type index per layer)."""
        key = tuple(int(kind) for kind in assignment)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = provision(self.model, key, self.floor)
        return plan


def greedy(evaluate: Evaluator) -> Plan:
    """Place layer after layer, see `rivals.greedy`."""
    return rivals.run("greedy", Problem(evaluate.model, evaluate.floor)).plan


def one_device(evaluate: Evaluator, cpu: bool) -> Plan:
    """Place every layer on one CPU type, or on one GPU type, see `rivals.rules`."""
    name = "all-cpu" if cpu else "all-gpu"
    return rivals.run(name, Problem(evaluate.model, evaluate.floor)).plan


def random(evaluate: Evaluator, seed: int = 0, draws: int = 64) -> Plan:
    """Draw assignments uniformly until `draws` distinct ones were seen; the best of them."""
    problem = Problem(evaluate.model, evaluate.floor)
    return rivals.run("random", problem, Budget(evaluations=draws), seed).plan
