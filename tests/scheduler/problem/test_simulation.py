"""The simulation of steps against hand-computed cases, and against a second one in whole ticks."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.engine import _planner
from scheduler.problem.cost import CostModel
from scheduler.problem.steps import Steps
from scheduler.problem.workload import Resources, Workload
from tests.scheduler.instances import cost, resources, workload
from tests.scheduler.ticks import Stages, ticks

# Times of at least a second, so that no two things of one worker happen at one moment.
_stages = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(1, 6),
        st.sampled_from([2, 2, 4]),
        st.integers(1, 5),
    ),
    min_size=1,
    max_size=4,
)
_many = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.integers(1, 9),
        st.integers(1, 9),
        st.sampled_from([0, 2, 8]),
        st.sampled_from([0, 1, 40]),
    ),
    min_size=1,
    max_size=8,
)

_ways = st.sampled_from([0, 2, 6])
_delays = st.lists(st.sampled_from([0, 0, 3, 8]), min_size=4, max_size=4)


@settings(max_examples=150)
@given(
    _stages, st.integers(1, 7), st.integers(0, 2), st.integers(1, 5), _ways, st.booleans(), _delays
)
def test_simulation_equals_one_in_ticks(
    stages: Stages,
    micro_batches: int,
    staleness: int,
    steps: int,
    way: int,
    whole: bool,
    delays: list[int],
) -> None:
    given_ = [(u, float(f), float(b), float(x), float(s)) for u, f, b, x, s in stages]
    given_[-1] = (*given_[-1][:3], 0.0, given_[-1][4])
    late = delays[: len(stages)]
    at = ticks(stages, micro_batches, staleness, steps, way, whole, late)
    between = [end - start for start, end in pairwise([0, *at])]
    found = _planner.simulate(
        given_, micro_batches, staleness, steps, float(way), whole, [float(d) for d in late]
    )
    assert found == pytest.approx(between)


@settings(max_examples=150)
@given(_stages, st.integers(1, 9), _ways, st.booleans(), _delays)
def test_no_step_is_faster_than_its_bound(
    stages: Stages, micro_batches: int, way: int, whole: bool, delays: list[int]
) -> None:
    given_ = [(u, float(f), float(b), float(x), float(s)) for u, f, b, x, s in stages]
    given_[-1] = (*given_[-1][:3], 0.0, given_[-1][4])
    late = [float(d) for d in delays[: len(stages)]]
    bound = _planner.step_bound(given_, micro_batches, float(way), late)
    taken = _planner.simulate(given_, micro_batches, 0, 1, float(way), whole, late)[0]
    assert bound <= taken * (1 + 1e-12)


@settings(max_examples=400)
@given(_many, st.integers(1, 18), _ways, st.booleans())
def test_no_step_of_many_stages_is_faster_than_its_bound(
    stages: Stages, micro_batches: int, way: int, whole: bool
) -> None:
    """Where early stages compute what later ones let back round by round."""
    given_ = [(u, float(f), float(b), float(x), float(s)) for u, f, b, x, s in stages]
    given_[-1] = (*given_[-1][:3], 0.0, given_[-1][4])
    bound = _planner.step_bound(given_, micro_batches, float(way))
    taken = _planner.simulate(given_, micro_batches, 0, 1, float(way), whole)[0]
    assert bound <= taken * (1 + 1e-9)


def test_a_bound_knows_the_rounds_of_an_early_stage_behind_a_late_one() -> None:
    """Two workers let two micro-batches back after 8, 16 and 24 s; of the last two the one before
    them has both to compute, 3 s each."""
    stages = [(1, 0.0, 3.0, 0.0, 0.0), (2, 4.0, 4.0, 0.0, 0.0)]
    assert _planner.step_bound(stages, 6) == pytest.approx(30.0)
    assert _planner.simulate(stages, 6, 0, 1) == pytest.approx([30.0])


def _even(*units: int) -> list[tuple[int, float, float, float, float]]:
    """Stages of one pace: a micro-batch a second, a third of it forward."""
    return [(k, k / 3, 2 * k / 3, 0.0, 0.0) for k in units]


def test_flushed_steps_fill_and_drain() -> None:
    """Four even stages: M + 3 micro-batches' time; 1 + 3 units likewise."""
    assert _planner.simulate(_even(1, 1, 1, 1), 4, 0, 3) == pytest.approx([7.0] * 3)
    assert _planner.simulate(_even(1, 1, 1, 1), 16, 0, 3) == pytest.approx([19.0] * 3)
    assert _planner.simulate(_even(1, 3), 4, 0, 2) == pytest.approx([7.0] * 2)


def test_a_loss_of_whole_batches_has_all_forwards_come_first() -> None:
    """Two stages: four forwards and the last one's way, then as many backwards and theirs."""
    assert _planner.simulate(_even(1, 1), 4, 0, 2, 0.0, True) == pytest.approx([5.0] * 2)
    # The first stage holds all twelve, of which else it would have ten at most.
    stages = [(1, 1.0, 1.0, 0.0, 0.0), (4, 9.0, 1.0, 0.0, 0.0)]
    assert _planner.simulate(stages, 12, 0, 1, 0.0, True) == pytest.approx([44.0])
    # Staleness has the forwards of the next step fill the pause.
    flushed = _planner.simulate(_even(1, 1), 4, 0, 20, 0.0, True)[-1]
    assert _planner.simulate(_even(1, 1), 4, 1, 20, 0.0, True)[-1] < 0.95 * flushed


def test_one_worker_is_never_idle() -> None:
    assert _planner.simulate([(1, 1.0, 2.0, 0.0, 5.0)], 4, 0, 2) == pytest.approx([17.0] * 2)
    # The sums of a step pass while the next computes.
    assert _planner.simulate([(1, 1.0, 2.0, 0.0, 5.0)], 4, 1, 9)[4:] == pytest.approx([12.0] * 5)


def test_what_passes_after_a_sum_keeps_nothing_busy() -> None:
    """Without staleness it is on the way of every step. With it a second step fills the pause,
    until what is away takes longer than that one."""
    alone = [(1, 1.0, 2.0, 0.0, 1.0)]
    assert _planner.simulate(alone, 1, 0, 3, delays=[4.0]) == pytest.approx([8.0] * 3)
    steady = _planner.simulate(alone, 4, 1, 9, delays=[4.0])[4:]
    assert steady == pytest.approx([12.0] * 5)
    assert sum(_planner.simulate(alone, 1, 1, 40, delays=[4.0])[20:]) / 20 == pytest.approx(4.0)
    # Sums take turns, and would take 5 s each.
    summed = [(1, 1.0, 2.0, 0.0, 5.0)]
    assert sum(_planner.simulate(summed, 1, 1, 40)[20:]) / 20 == pytest.approx(5.0)


def test_what_crosses_takes_turns_on_a_link() -> None:
    stages = [(1, 1.0, 1.0, 8.0, 0.0), (1, 1.0, 1.0, 0.0, 0.0)]
    assert _planner.simulate(stages, 1, 0, 1) == pytest.approx([12.0])
    assert _planner.simulate(stages, 20, 1, 20)[-1] == pytest.approx(160.0, rel=0.02)


def test_what_is_on_its_way_makes_nothing_else_wait() -> None:
    stages = [(1, 1.0, 1.0, 0.0, 0.0), (1, 1.0, 1.0, 0.0, 0.0)]
    assert _planner.simulate(stages, 1, 0, 1, 8.0) == pytest.approx([12.0])
    # Three more may be in flight meanwhile, of which the first stage may hold four.
    assert _planner.simulate(stages, 8, 0, 1, 2.0) == pytest.approx([20.0])


@pytest.mark.parametrize("cross", [0.0, 1e-6])
def test_what_has_to_cross_is_late_for_one_that_ends_as_it_leaves(cross: float) -> None:
    """At 22 s where it came at once: a worker goes on with what it has at that moment."""
    stages = [(1, 3.0, 2.0, cross, 0.0), (2, 1.0, 5.0, 0.0, 0.0)]
    assert _planner.simulate(stages, 4, 0, 1) == pytest.approx([20.0])


def test_forwards_come_first_until_the_stages_are_filled() -> None:
    """Widths of 2 and 5, four of which compute: 120 s of work a step for each worker. With
    gradients first, steps took 181 and 120 s in turn, as one begins just when that before ends.
    """
    stages = [(2, 20.0, 40.0, 1.0, 0.0), (5, 40.0, 80.0, 0.0, 1.0)]
    steady = _planner.simulate(stages, 4, 1, 60)[30:]
    assert sum(steady) / len(steady) == pytest.approx(120.0, rel=0.01)


@pytest.mark.parametrize(("micro_batches", "least", "most"), [(4, 0.45, 0.56), (24, 0.99, 1.01)])
def test_one_step_of_staleness_does_not_always_fill(
    micro_batches: int, least: float, most: float
) -> None:
    seconds = _planner.simulate(_even(2, 5, 2, 1, 2), micro_batches, 1, 60)[30:]
    assert least < micro_batches * len(seconds) / sum(seconds) < most


_layers = st.lists(
    st.tuples(
        st.integers(1, 3),  # seconds of a micro-batch forward; three times as many back
        st.sampled_from([0, 2, 4]),  # that it crosses to the next stage and back
        st.sampled_from([0, 6, 12]),  # that the step's sum takes one worker
        st.integers(1, 3),  # units
        st.sampled_from([0, 5]),  # that the update is later than the sum
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100)
@given(
    _layers,
    st.sampled_from([4, 8, 16]),
    _ways,
    st.sampled_from([0, 2]),
    st.lists(st.sampled_from([0, 2, 6]), min_size=9, max_size=9),
)
def test_the_price_of_a_flushed_plan_is_what_an_independent_simulation_takes(
    layers: list[tuple[int, int, int, int, int]],
    micro_batches: int,
    way: int,
    handling: int,
    passing: list[int],
) -> None:
    """From the workload on: each layer on a type of its own is a stage. All numbers are exact, as
    what happens at one moment may happen in either order otherwise."""
    names = [f"cpu{n}" for n in range(len(layers))]
    rows = [
        {
            name: cost(
                4.0 * forward * micro_batches,
                forward_share=0.25,
                transfer_s=float((cross + 2 * passed) * micro_batches),
                sync_s=float(sync),
                delay_s=float(delay),
            )
        }
        for name, (forward, cross, sync, _, delay), passed in zip(
            names, layers, passing, strict=False
        )
    ]
    size = {"batch": 128, "reference_batch": 128, "micro_batches": micro_batches}
    crossing = {"crossing_s": float(way + 2 * handling), "handling_s": float(handling)}
    work = workload(*rows, **size, staleness=0, ps_type="", **crossing)
    for layer, passed in zip(work["layers"], passing, strict=False):
        layer["passing_s"] = passed * micro_batches / 128
    offer = resources(**dict.fromkeys(names, (1.0, 3)))
    steps = Steps(0, micro_batches, 128, simulated=True)
    priced = CostModel(Workload.parse(work), Resources.parse(offer), steps=steps).evaluate(
        tuple(range(len(layers))), tuple(units for *_, units, _ in layers)
    )
    last = len(layers) - 1
    passed = [handling + each for each in passing[:last]]  # behind each stage but the last
    half = [(a + b) // 2 for a, b in pairwise([0, *passed, 0])]
    stages = [
        (units, forward + half[n], 3 * forward + half[n], cross if n < last else 0, sync // units)
        for n, (forward, cross, sync, units, _) in enumerate(layers)
    ]
    step = ticks(stages, micro_batches, 0, 1, way, delays=[delay for *_, delay in layers])[0]
    assert step * (1 - 1e-9) <= 128 / priced.throughput <= 1.05 * step


@pytest.mark.parametrize("longer", [0.96, 1.0, 1.04])
def test_a_pace_is_none_that_a_little_takes_away(longer: float) -> None:
    """Two steps in flight run apart, at 67 s a step, or one behind the other, at 80 or more."""
    stages = [(1, 30.2 * longer, 23.3, 6.7, 12.6), (1, 20.2, 25.2, 6.7, 0.1), (1, 0.9, 1.1, 0, 0)]
    apart = sum(_planner.simulate(stages, 1, 1, 80, 2.5)[40:]) / 40
    assert _planner.step_seconds(stages, 1, 1, 53.5, 2.5) >= max(apart, 80.0)


@pytest.mark.parametrize("delay", [0.01, 0.05, 0.3, 1.0])
@pytest.mark.parametrize(("staleness", "parts"), [(1, 50), (2, 7), (3, 100)])
def test_a_pace_is_of_whole_turns_of_the_steps_in_flight(
    staleness: int, parts: int, delay: float
) -> None:
    """One worker of 20 ms a step, whose updates come late: S+1 steps a round, at its own pace."""
    stage = (1, 0.01 / parts, 0.01 / parts, 0.0, 0.0)
    found = _planner.step_seconds([stage], parts, staleness, 0.0, 0.0, False, [delay])
    assert found == pytest.approx(max(0.02, (0.02 + delay) / (staleness + 1)), rel=1e-9)
