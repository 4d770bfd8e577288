"""What interruptions of spot units add to the time, and so to the cost, of a whole plan.

A unit of type t is taken away r_t times an hour, and all units of the job wait until there is
another: for `recovery_s`, where its stage has other workers; for `restart_s`, where it was the
only one or held rows, so that the steps since the last cut are done again. Of each hour trained a
plan loses

    R = sum of r_t * units * lost_s / 3600 over its stages and its parameter server

hours, so that its samples take 1 + R times as long and cost price * time * (1 + R). Interruptions
that come during a recovery are not counted.

That couples all stages: what one unit costs depends on all others. Searches need a price a unit,
so they are given one that is never too high: a plan of P dollars an hour loses P * R, and where it
is known that P >= w,

    P * (1 + R) >= sum of units * (p_t + r_t * lost_s / 3600 * max(p_t, w)),

since P is at least the price of each unit in it. With w = 0 that holds for all plans. So what a
search has found is priced by the formula above, and what it has proven remains a bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.problem.workload import Resources, ResourceType

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Hours that a unit's interruptions cost the plan in an hour of training, by type, [T].

    `shared` where the unit's stage has other workers, and `alone` where not.
    """

    shared: Floats
    alone: Floats

    @classmethod
    def of(cls, resources: Resources) -> "Interruptions":
        """Those of the types on offer."""
        return cls(
            np.array([_lost(kind, kind.recovery_s) for kind in resources.types]),
            np.array([_lost(kind, kind.alone_s) for kind in resources.types]),
        )

    @property
    def matter(self) -> bool:
        """Whether some plan may lose time."""
        return bool(self.alone.any())

    def lost_share(self, stages: Iterable[tuple[int, float]], ps_type: int, ps_units: int) -> float:
        """R of a plan: hours lost for an hour trained; `stages` are types and units."""
        lost = sum(
            float((self.alone if units == 1 else self.shared)[kind]) * units
            for kind, units in stages
        )
        return lost + float(self.alone[ps_type]) * ps_units

    def prices(self, paid: Floats, expected: "Expected") -> Floats:
        """What a search counts an hour of a unit as, [T]."""
        lost = self.alone if expected.alone else self.shared
        found: Floats = paid + lost * np.maximum(paid, expected.waiting)
        return found


@dataclass(frozen=True, slots=True)
class Expected:
    """What a search takes for granted of the plan that it looks for.

    That it costs `waiting` dollars an hour at least, takes `slowdown` times as long as without
    interruptions, and where `alone` has stages of one unit. With the defaults of the last two what
    it proves holds for all plans of that price; with others it finds plans that keep the floor in
    spite of interruptions, or lose less.
    """

    waiting: float = 0.0
    slowdown: float = 1.0
    alone: bool = False


def _lost(kind: ResourceType, seconds: float) -> float:
    return kind.interruptions_per_hour * seconds / 3600
