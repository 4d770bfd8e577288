"""How many of a type's cores each worker of a job has, where the price list leaves it open.

For each number there is an offer, whose units are so many cores, a profile and a plan; the cheapest
of these is the job's. Elsewhere there is one of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import NodeStatus
from scheduler.problem.threads import choices
from scheduler.problem.wording import money_text
from scheduler.runs.constraints import Constrained
from scheduler.runs.offer import Offer, OfferError, make_offer


@dataclass(frozen=True, slots=True)
class Option:
    """A plan for one number of threads, with what it was made from."""

    offer: Offer
    constrained: Constrained
    decision: Decision

    @property
    def cost(self) -> float:
        """Dollars, with what steps take besides layers: of faster ones that is a larger part."""
        return self.decision.cost / (1 - self.constrained.workload.overhead)

    @property
    def throughput(self) -> float:
        """Samples/s, likewise."""
        return self.decision.throughput * (1 - self.constrained.workload.overhead)


def open_type(spec: JobSpec) -> str:
    """The type that leaves its threads open; empty: there is none."""
    return next((kind.name for kind in spec.schedule.offered.types if kind.threads_any), "")


def offers_of(spec: JobSpec, live: Sequence[NodeStatus]) -> list[Offer]:
    """What a job can be planned on, for each number of threads that can be had.

    Costs that the job gives are of one number. One alone is offered, too, where the job says how
    many units it is to have, since units would be of as many cores; and of a type that is emulated,
    whose costs are no measurement.

    Raises:
        OfferError: there is nothing.
    """
    kind, given = open_type(spec), spec.schedule.given
    options = choices(spec.schedule.offered.types)
    if kind and given.layers:
        number = given.threads.get(kind, 1)
        if {kind: number} not in options:
            numbers = " or ".join(str(one[kind]) for one in options)
            raise OfferError(
                f"schedule.workload: threads.{kind}: the costs are of a worker with {number}; "
                f"expected {numbers}, as schedule.resources says"
            )
        options = [{kind: number}]
    emulated = any(node.emulated for node in live if node.type == kind)
    if emulated or spec.schedule.elastic.min or spec.schedule.elastic.max:
        options = options[:1]
    found: list[Offer] = []
    failed: list[OfferError] = []
    for some in options:
        try:
            found.append(make_offer(spec, live, some))
        except OfferError as error:
            failed.append(error)
    if not found:
        raise failed[0]
    return [one for one in found if kind not in one.missing] or found[:1]


def routed(spec: JobSpec, offer: Offer) -> JobSpec:
    """A job without products chosen to run elsewhere by workers of other threads than offered.

    Sums are others then anyway, and what was measured with those threads is nothing.
    """
    threads = {kind.name: kind.threads or 1 for kind in offer.resources.types}
    kept = [
        one
        for one in spec.train.routes
        if threads.get(one.type, one.threads or 1) == (one.threads or 1)
    ]
    found = JobSpec()
    found.CopyFrom(spec)
    del found.train.routes[:]
    found.train.routes.extend(kept)
    return found


def cheapest(options: Sequence[Option]) -> Option:
    """The one whose plan is the best: that meets the demands, is cheap, then fast."""

    def rank(option: Option) -> tuple[bool, float, float]:
        feasible = option.decision.feasible
        return not feasible, option.cost if feasible else 0.0, -option.throughput

    return min(options, key=rank)


def compared(chosen: Option, options: Sequence[Option]) -> list[str]:
    """Why workers have the threads that they have, where that was open."""
    if len(options) < 2:
        return []
    kind = next(name for one in options if (name := _sized(one.offer)))

    def threads(option: Option) -> int:
        found = {one.name: one.threads or 1 for one in option.offer.resources.types}
        return found[kind]

    def told(option: Option) -> str:
        number, feasible = threads(option), option.decision.feasible
        price = money_text(option.cost) if feasible else "no plan meets the demands"
        return f"on {number} core{'s' if number > 1 else ''}: {price}"

    others = [one for one in options if one is not chosen]
    each = "; ".join(map(told, (chosen, *others)))
    return [f"Each worker on {kind} computes {each}; with what steps take besides layers."]


def _sized(offer: Offer) -> str:
    return next((one.name for one in offer.resources.types if one.node_units), "")
