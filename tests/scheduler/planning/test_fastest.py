"""The highest throughput that a decision tells: the pace in steps of a plan that there is."""

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler import Decision, plan
from scheduler.planning.elastic import Bounds, plan_within, units_of
from scheduler.problem.wording import rate_text
from scheduler.problem.workload import Resources
from tests.scheduler.instances import cost, resources, workload
from tests.scheduler.ticks import ticks

_BATCH, _STEPS, _LIMIT = 128, 60, 3


def _decided(
    forwards: list[int], parts: int, staleness: int, overhead: float, floor: float = 0.0
) -> Decision:
    """Each layer on a type of its own: seconds of a micro-batch forward, and three times back."""
    rows = [
        {f"type{n}": cost(4.0 * seconds * parts, forward_share=0.25)}
        for n, seconds in enumerate(forwards)
    ]
    size = {"batch": _BATCH, "reference_batch": _BATCH, "micro_batches": parts, "ps_type": ""}
    work = workload(*rows, **size, staleness=staleness, overhead=overhead)
    offer = resources(**{name: (1.0, _LIMIT) for row in rows for name in row})
    return plan(work, offer, floor or None, "exact")


def _paces(forwards: list[int], parts: int, staleness: int) -> list[float]:
    """Samples/s of every plan, by an independent simulation, over the later steps.

    Of steps that overlap those of the slowest of three: as it is, and with a twentieth of each
    micro-batch's time moved from backward to forward, or back.
    """
    paces, steady = [], _STEPS // 2
    for units in product(range(1, _LIMIT + 1), repeat=len(forwards)):
        found = []
        for moved in (-1, 0, 1) if staleness else (0,):  # of 20 parts, 5 of which are forward
            stages = [
                (k, (5 + moved) * f, (15 - moved) * f, 0, 0)
                for k, f in zip(units, forwards, strict=True)
            ]
            at = ticks(stages, parts, staleness, _STEPS)
            found.append(5 * _BATCH * steady / (at[-1] - at[-1 - steady]))
        paces.append(min(found))
    return paces


@settings(max_examples=6)
@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 1),
    st.sampled_from([0.0, 0.2]),
)
@example([1, 1, 3], 4, 1, 0.0)  # two more units than the slowest stage asks for
def test_it_is_the_pace_of_a_plan_that_there_is(
    forwards: list[int], parts: int, staleness: int, overhead: float
) -> None:
    paces = _paces(forwards, parts, staleness)
    top = _decided(forwards, parts, staleness, overhead).max_throughput
    assert top == pytest.approx(max(paces), rel=0.02)
    # Floors are aimed at with what the executor takes besides.
    reached = _decided(forwards, parts, staleness, overhead, 0.97 * top * (1 - overhead))
    assert reached.feasible
    assert not _decided(forwards, parts, staleness, overhead, 1.03 * top * (1 - overhead)).feasible


def test_a_floor_that_only_the_slowest_stage_reaches_is_refused_with_what_a_plan_runs_at() -> None:
    """Three stages of one unit wait for each other's updates of two steps of a micro-batch."""
    forwards, parts, staleness = [1, 1, 1], 1, 1
    best = max(_paces(forwards, parts, staleness))
    assert best < 0.7 * _BATCH * _LIMIT / 4, "the slowest stage alone would be that much faster"
    decision = _decided(forwards, parts, staleness, 0.0, 1.1 * best)
    assert not decision.feasible
    assert decision.max_throughput == pytest.approx(best, rel=0.02)
    told = rate_text(decision.max_throughput, down=True)
    assert f"the highest throughput found is {told}" in decision.plan.reason
    (floor,) = [c for c in decision.relaxations if c.key == "min_throughput"]
    assert floor.needed == pytest.approx(decision.max_throughput)
    for other in [decision.plan, *(one.plan for one in decision.alternatives)]:
        assert other.throughput <= best * 1.02


def test_as_many_units_as_are_asked_for_also_where_the_executor_takes_its_share() -> None:
    work = workload({"cpu": cost(2.0)}, batch=96, staleness=1, overhead=0.2)

    def decide(some: Resources, floor: float, _exclude: object) -> Decision:
        return plan(work, some, floor or None, "exact")

    found = plan_within(Bounds(5), Resources.parse(resources(cpu=(0.05, 8))), 0.0, decide)
    assert found.feasible
    assert units_of(found) >= 5
