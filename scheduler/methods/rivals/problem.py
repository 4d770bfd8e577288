"""What a rival is given, and what it gives back."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scheduler.problem.cost import CostModel, Floats
from scheduler.problem.plan import Plan
from scheduler.problem.provision import provision

# Type index of each layer, one assignment a row: [n, L].
Assignments = NDArray[np.int32]


@dataclass(frozen=True)
class Problem:
    """A cost model, with its pins, exclusions and price cap, and the floor in samples/s."""

    model: CostModel
    floor: float = 0.0

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """[L, T]: types that may run a layer and whose unit holds it."""
        return self.model.usable

    @property
    def assignments(self) -> float:
        """How many assignments there are; infinite beyond the range of a float."""
        choices = self.usable.sum(axis=1)
        if self.model.cuts:
            choices[1:] *= 2
        with np.errstate(over="ignore"):
            return float(np.prod(choices, dtype=float))

    @cached_property
    def money(self) -> Floats:
        """Dollars an hour x seconds a sample of each layer alone on one unit, [L, T].

        Infinite where a type cannot run the layer.
        """
        model = self.model
        compute = model.compute_serial + model.compute_parallel
        sync = model.sync_serial + model.sync_parallel
        return np.where(self.usable, (compute + sync) * model.price, np.inf)

    @cached_property
    def alone(self) -> NDArray[np.int32]:
        """Each layer on the type where it alone is cheapest, [L]: needs no other decision."""
        cheapest: NDArray[np.int32] = self.money.argmin(axis=1).astype(np.int32)
        return cheapest

    def plan(self, assignment: NDArray[np.int32]) -> Plan:
        """Return the cheapest plan of one assignment, [L]."""
        return provision(self.model, tuple(assignment.tolist()), self.floor)

    def impossible(self) -> Plan | None:
        """Return a plan that says which layer no type can run, or None where there is none."""
        if self.usable.any(axis=1).all():
            return None
        # A type that may run the layer, if any, so that the reason is its memory.
        best = np.where(self.usable.any(axis=1, keepdims=True), self.usable, self.model.allowed)
        return self.plan(best.argmax(axis=1).astype(np.int32))


@dataclass(frozen=True, slots=True)
class Budget:
    """What a method may spend.

    Attributes:
        evaluations: distinct assignments that may be provisioned; None for the method's own number.
        seconds: wall time after which it stops. A result repeats from its seed only where this is
            not reached.
    """

    evaluations: int | None = None
    seconds: float = math.inf

    def __post_init__(self) -> None:
        if self.evaluations is not None and self.evaluations < 1:
            raise ValueError(f"evaluations: {self.evaluations!r}: expected at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds: {self.seconds!r}: expected more than 0")


@dataclass(frozen=True, slots=True)
class Found:
    """What a method came to.

    Attributes:
        plan: the best plan it saw; not feasible, with the reason, where it saw none that is.
        evaluations: distinct assignments it provisioned; 0 for a method that works otherwise.
        seconds: wall time.
        timed_out: the seconds stopped it, so another run may come to another plan.
    """

    plan: Plan
    evaluations: int
    seconds: float
    timed_out: bool = False
