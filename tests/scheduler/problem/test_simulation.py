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

Stages = list[tuple[int, int, int, int, int]]  # units, and whole seconds
_SECOND = 1 << 40  # ticks


def _ticks(
    stages: Stages, micro_batches: int, staleness: int, steps: int, way: int = 0
) -> list[float]:
    """When each update is made, in seconds; links take turns, and crossing takes a tick at least.

    What has passed a link is on its way for half of `way` more.

    So what ends at one moment at both ends of a link ends there before anything has crossed.
    """
    stages = [(units, *(time * _SECOND for time in times)) for units, *times in stages]
    depth, total = len(stages), micro_batches * steps
    arrived = [dict.fromkeys(range(total), 0), *({} for _ in stages[1:])]
    returned: list[dict[int, int]] = [{} for _ in stages]
    held = [[0] * stage[0] for stage in stages]
    next_ = [list(range(stage[0])) for stage in stages]
    oldest = [list(range(stage[0])) for stage in stages]
    # What a worker, and its link, is doing: end, kind, micro-batch.
    work: dict[tuple[int, int], tuple[int, str, int]] = {}
    link: dict[tuple[int, int], tuple[int, str, int]] = {}
    queue: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    flying: list[tuple[int, str, int, int]] = []  # arrival, kind, stage, micro-batch
    left = [[micro_batches] * steps for _ in stages]
    summed = [0] * depth
    sums: list[tuple[int, int]] = []
    open_, updates, updated = [depth] * steps, 0, [0] * steps
    half = [cross // 2 + 1 for _, _, _, cross, _ in stages]
    most = [2 * -(-sum(units for units, *_ in stages[s:]) // stages[s][0]) for s in range(depth)]
    now = 0
    while updates < steps:
        moved = True
        while moved:
            moved = False
            for at in [at for at in work if work[at][0] == now]:
                s, w = at
                _, kind, m = work.pop(at)
                moved = True
                if kind == "forward":
                    if s == depth - 1:
                        returned[s][m] = now
                    else:
                        queue.setdefault(at, []).append((now, m, "there"))
                else:
                    held[s][w] -= 1
                    if s:
                        below = (s - 1, m % stages[s - 1][0])
                        queue.setdefault(below, []).append((now, m, "back"))
                    left[s][m // micro_batches] -= 1
                    if not left[s][m // micro_batches]:
                        summed[s] = max(now, summed[s]) + stages[s][4]
                        sums.append((summed[s], m // micro_batches))
            for at in [at for at in link if link[at][0] == now]:
                _, kind, m = link.pop(at)
                moved = True
                flying.append((now + way * _SECOND // 2, kind, at[0], m))
            for one in [one for one in flying if one[0] == now]:
                flying.remove(one)
                _, kind, s, m = one
                moved = True
                if kind == "there":
                    arrived[s + 1][m] = now
                else:
                    returned[s][m] = now
            for end, step in [one for one in sums if one[0] == now]:
                sums.remove((end, step))
                moved = True
                open_[step] -= 1
                if not open_[step]:
                    updated[step], updates = now, step + 1
            for at, waiting in queue.items():
                if waiting and at not in link:
                    # First come, first served; of those at once the earlier micro-batch.
                    waiting.sort()
                    _, m, kind = waiting.pop(0)
                    link[at] = (now + half[at[0]], kind, m)
                    moved = True
            if moved:
                continue
            for s, (units, forward, backward, _, _) in enumerate(stages):
                for w in range(units):
                    if (s, w) in work:
                        continue
                    back = [m for m in returned[s] if m == oldest[s][w]]
                    m = next_[s][w]
                    if back:
                        m = back[0]
                        oldest[s][w] += units
                        del returned[s][m]
                        work[s, w] = (now + backward, "backward", m)
                    elif (
                        m in arrived[s]
                        and held[s][w] < most[s]
                        and m // micro_batches - staleness <= updates
                    ):
                        next_[s][w] += units
                        held[s][w] += 1
                        work[s, w] = (now + forward, "forward", m)
        ends = [*work.values(), *link.values(), *flying, *sums]
        assert ends or updates == steps, "nothing moves"
        now = min((end for end, *_ in ends), default=now)
    return [at / _SECOND for at in updated]


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

_ways = st.sampled_from([0, 2, 6])


@settings(max_examples=150, deadline=None)
@given(_stages, st.integers(1, 7), st.integers(0, 2), st.integers(1, 5), _ways)
def test_simulation_equals_one_in_ticks(
    stages: Stages, micro_batches: int, staleness: int, steps: int, way: int
) -> None:
    given_ = [(u, float(f), float(b), float(x), float(s)) for u, f, b, x, s in stages]
    given_[-1] = (*given_[-1][:3], 0.0, given_[-1][4])
    at = _ticks(stages, micro_batches, staleness, steps, way)
    between = [end - start for start, end in pairwise([0, *at])]
    found = _planner.simulate(given_, micro_batches, staleness, steps, float(way))
    assert found == pytest.approx(between)


@settings(max_examples=150, deadline=None)
@given(_stages, st.integers(1, 9), _ways)
def test_no_step_is_faster_than_its_bound(stages: Stages, micro_batches: int, way: int) -> None:
    given_ = [(u, float(f), float(b), float(x), float(s)) for u, f, b, x, s in stages]
    given_[-1] = (*given_[-1][:3], 0.0, given_[-1][4])
    bound = _planner.step_bound(given_, micro_batches, float(way))
    assert bound <= _planner.simulate(given_, micro_batches, 0, 1, float(way))[0] * (1 + 1e-12)


def _even(*units: int) -> list[tuple[int, float, float, float, float]]:
    """Stages of one pace: a micro-batch a second, a third of it forward."""
    return [(k, k / 3, 2 * k / 3, 0.0, 0.0) for k in units]


def test_flushed_steps_fill_and_drain() -> None:
    """Four even stages: M + 3 micro-batches' time; 1 + 3 units likewise."""
    assert _planner.simulate(_even(1, 1, 1, 1), 4, 0, 3) == pytest.approx([7.0] * 3)
    assert _planner.simulate(_even(1, 1, 1, 1), 16, 0, 3) == pytest.approx([19.0] * 3)
    assert _planner.simulate(_even(1, 3), 4, 0, 2) == pytest.approx([7.0] * 2)


def test_one_worker_is_never_idle() -> None:
    assert _planner.simulate([(1, 1.0, 2.0, 0.0, 5.0)], 4, 0, 2) == pytest.approx([17.0] * 2)
    # The sums of a step pass while the next computes.
    assert _planner.simulate([(1, 1.0, 2.0, 0.0, 5.0)], 4, 1, 9)[4:] == pytest.approx([12.0] * 5)


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
    """At 68 s where it came at once: a worker goes on with what it has at that moment."""
    stages = [(1, 2.0, 4.0, cross, 0.0), (2, 1.0, 5.0, 0.0, 0.0)]
    assert _planner.simulate(stages, 11, 0, 1) == pytest.approx([72.0])


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
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(_layers, st.sampled_from([4, 8, 16]), _ways)
def test_the_price_of_a_flushed_plan_is_what_an_independent_simulation_takes(
    layers: list[tuple[int, int, int, int]], micro_batches: int, way: int
) -> None:
    """From the workload on: each layer on a type of its own is a stage. All numbers are exact, as
    what happens at one moment may happen in either order otherwise."""
    names = [f"type{n}" for n in range(len(layers))]
    rows = [
        {
            name: cost(
                4.0 * forward * micro_batches,
                forward_share=0.25,
                transfer_s=float(cross * micro_batches),
                sync_s=float(sync),
            )
        }
        for name, (forward, cross, sync, _) in zip(names, layers, strict=True)
    ]
    size = {"batch": 128, "reference_batch": 128, "micro_batches": micro_batches}
    work = workload(*rows, **size, staleness=0, ps_type="", crossing_s=float(way))
    offer = resources(**dict.fromkeys(names, (1.0, 3)))
    steps = Steps(0, micro_batches, 128, simulated=True)
    priced = CostModel(Workload.parse(work), Resources.parse(offer), steps=steps).evaluate(
        tuple(range(len(layers))), tuple(units for *_, units in layers)
    )
    last = len(layers) - 1
    stages = [
        (units, forward, 3 * forward, cross if n < last else 0, sync // units)
        for n, (forward, cross, sync, units) in enumerate(layers)
    ]
    step = _ticks(stages, micro_batches, 0, 1, way)[0]
    assert step * (1 - 1e-9) <= 128 / priced.throughput <= 1.05 * step
