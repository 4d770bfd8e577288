"""The record of a proposal: another plan for the rest of a run, and what it would take to move."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from protos import scheduler_pb2 as pb
from protos.decision_pb2 import Alternative as AlternativeMessage
from scheduler.decision.record import Decision
from scheduler.problem import mapper
from scheduler.problem.fields import InputError
from scheduler.problem.plan import Plan, PlanStage


@dataclass(frozen=True, slots=True)
class Moving:
    """Seconds that moving to another plan takes: drain, save, start the new workers, pull.

    The defaults are guesses, to be replaced by what a job was seen to take.

    Raises:
        InputError: a time is negative or not finite.
    """

    drain_s: float = 2.0
    save_s: float = 10.0
    restart_s: float = 20.0
    pull_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("drain_s", "save_s", "restart_s", "pull_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise InputError("", f"moving.{name}", f"{value!r}: expected seconds, at least 0")

    @classmethod
    def as_before(cls, seconds: Sequence[float], restart_s: float) -> "Moving":
        """Of a job that has moved, or lost workers, before: the longest of these, and a start.

        Args:
            seconds: that training paused for each time; of none the defaults are taken.
            restart_s: that its processes took to start.
        """
        longest = max(seconds, default=0.0)
        return cls(0.0, 0.0, restart_s + longest, 0.0) if longest else cls(restart_s=restart_s)

    @property
    def seconds(self) -> float:
        """In all."""
        return self.drain_s + self.save_s + self.restart_s + self.pull_s


FLOOR_SLACK = 0.05  # the cheapest plan stands on the floor: a miss within noise is none
NEXT_RUN = Moving(0.0, 0.0, 0.0, 0.0)  # a run that has ended has nothing to move


@dataclass(frozen=True, slots=True)
class Threshold:
    """What another plan must save to be proposed.

    More than the cost of moving, by the fraction `margin` of it; and more than the fraction
    `share` of what the remaining samples cost, because no profile is exact to less.

    Raises:
        InputError: a fraction is negative or not finite.
    """

    margin: float = 0.5
    share: float = 0.05

    def __post_init__(self) -> None:
        for name in ("margin", "share"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                expected = "a fraction of at least 0"
                raise InputError("", f"threshold.{name}", f"{value!r}: expected {expected}")

    def met(self, savings: float, moving_cost: float, current_cost: float) -> bool:
        """Whether `savings` dollars are enough."""
        return savings > moving_cost * (1 + self.margin) and savings > self.share * current_cost


@dataclass(frozen=True, slots=True)
class Floor:
    """Samples/s: demanded, expected of the running plan, and needed of another.

    A running plan that misses the floor by no more than `FLOOR_SLACK` is not held to it, nor is
    another: else noise alone would have units added.
    """

    demanded: float
    expected: float
    needed: float
    missed: bool

    @classmethod
    def of(cls, demanded: float, expected: float) -> "Floor":
        """The floor of a plan that is expected to make `expected` samples/s."""
        missed = expected < demanded * (1 - FLOOR_SLACK)
        return cls(demanded, expected, demanded if missed else min(demanded, expected), missed)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Another plan for the remaining samples beside the running one; costs are for these samples.

    Attributes:
        worthwhile: to move pays, or the running plan misses the floor and the other meets it.
        reasons: sentences: what was measured, what it costs to stay, to go and to move.
        overhead: measured over modelled seconds a sample, each stage's time being as measured, at
            least 1; both costs include it.
        current_cost, proposed_cost: dollars; the latter is infinite where no plan was found.
        moving_s, moving_cost: seconds and dollars that moving takes.
        savings: current_cost - proposed_cost, without the cost of moving.
        current: the running plan by the updated figures.
        proposed: the decision for the new plan, its workload updated, its samples the remaining.
    """

    worthwhile: bool
    reasons: tuple[str, ...]
    remaining_samples: float
    overhead: float
    current_cost: float
    proposed_cost: float
    moving_s: float
    moving_cost: float
    savings: float
    current: Plan
    proposed: Decision

    @property
    def net_savings(self) -> float:
        """Dollars that are left after moving."""
        return self.savings - self.moving_cost

    @property
    def moves(self) -> bool:
        """Whether the proposed plan is another one than the running."""
        return shape(self.current.stages) != self.target

    @property
    def target(self) -> tuple[tuple[int, int, str, int], ...]:
        """What tells the proposed plan from others."""
        return shape(self.proposed.stages)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; a number that is not finite is null."""
        current = mapper.to_json(self.current)
        names = ("assignment", "ps_units", "throughput", "price_per_hour")
        return {
            **mapper.to_json(self, _PLANS),
            "current": {
                **{name: current[name] for name in names},
                "stages": [
                    {"first": s.first, "last": s.last, "type": s.type, "units": s.units}
                    for s in self.current.stages
                ],
            },
            "proposed": self.proposed.to_json(),
        }

    def to_message(self) -> pb.Proposal:
        """Return the message of the same content."""
        return pb.Proposal(
            **mapper.to_fields(self, _PLANS),
            current=AlternativeMessage(method="current", **mapper.to_fields(self.current)),
            proposed=self.proposed.to_message(),
        )

    @classmethod
    def from_message(cls, message: pb.Proposal) -> "Proposal":
        """Return the proposal that a message holds."""
        current = mapper.of_message(message.current, ("method", "seconds", "evaluations"))
        return mapper.from_fields(
            cls,
            mapper.of_message(message, _PLANS),
            current=mapper.from_fields(Plan, current),
            proposed=Decision.from_message(message.proposed),
        )


_PLANS: Final = ("current", "proposed")


def shape(stages: Sequence[PlanStage]) -> tuple[tuple[int, int, str, int], ...]:
    """What makes two plans the same: layers, types and units."""
    return tuple((stage.first, stage.last, stage.type, stage.units) for stage in stages)
