"""The simulation of runs: the planner's where nothing is added; else by hand, and a second one."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.engine import _planner
from scheduler.simulation.training import (
    Costs,
    Kill,
    Rows,
    Stage,
    Training,
    ring_s,
    simulate,
)
from tests.scheduler.simulation.processes import OneStage
from tests.scheduler.ticks import ticks

_stages = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.integers(1, 4),
        st.integers(1, 6),
        st.sampled_from([0, 2, 4]),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=4,
)


def _training(
    stages, micro_batches: int, staleness: int, way: float = 0.0, whole=False, delays=(0.0,) * 4
):
    last = len(stages) - 1
    made = tuple(
        Stage(units, forward, backward, cross if n < last else 0.0, way, sync, delay_s=delays[n])
        for n, (units, forward, backward, cross, sync) in enumerate(stages)
    )
    return Training(made, micro_batches, staleness, micro_batches, whole_batch=whole)


@settings(max_examples=200)
@given(
    _stages,
    st.integers(1, 7),
    st.integers(0, 2),
    st.integers(1, 6),
    st.booleans(),
    st.tuples(*[st.sampled_from([0.0, 0.0, 3.0, 8.0])] * 4),
)
def test_without_anything_besides_it_is_the_promises_simulation(
    stages, micro_batches: int, staleness: int, steps: int, whole: bool, delays: tuple[float, ...]
) -> None:
    """To the bit, at any staleness: what plans are priced by."""
    given_ = [(u, float(f), float(b), float(x), float(s)) for u, f, b, x, s in stages]
    given_[-1] = (*given_[-1][:3], 0.0, given_[-1][4])
    way = 2.0
    late = delays[: len(given_)]
    priced = _planner.simulate(given_, micro_batches, staleness, steps, way, whole, late)
    training = _training(given_, micro_batches, staleness, way, whole, delays)
    found = simulate(training, steps, warm=0)
    assert found.step_s.tolist() == pytest.approx(priced, rel=0, abs=1e-9)
    assert found.seconds == pytest.approx(list(accumulate(priced))[-1])
    assert found.backwards == steps * micro_batches * len(stages)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(*[st.integers(1, 4)] * 3, st.sampled_from([2, 4]), st.integers(1, 4)),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 6),
    st.integers(0, 1),
    st.integers(1, 4),
)
def test_it_is_one_in_ticks_that_shares_nothing_with_it(
    stages, micro_batches: int, staleness: int, steps: int
) -> None:
    at = ticks(stages, micro_batches, staleness, steps)
    found = simulate(_training(stages, micro_batches, staleness), steps, warm=0)
    assert np.cumsum(found.step_s) == pytest.approx(at)


_seconds = st.integers(1, 9973).map(lambda n: n / 997)


@settings(max_examples=200)
@given(
    slow=st.lists(_seconds, min_size=1, max_size=4, unique=True),
    micro_batches=st.integers(1, 6),
    staleness=st.integers(0, 2),
    steps=st.integers(1, 6),
    times=st.tuples(*[_seconds] * 9),
    shards=st.lists(_seconds, min_size=1, max_size=3),
)
def test_rows_are_a_second_simulation_of_shards(
    slow, micro_batches, staleness, steps, times, shards
) -> None:
    forward, backward, sync, closing, way, message, pull, push, commit = times
    second = OneStage(
        slow,
        micro_batches,
        staleness,
        steps,
        forward,
        backward,
        sync,
        closing,
        way,
        message,
        pull,
        push,
        commit,
        shards,
    )
    count = len(shards)
    training = Training(
        (Stage(len(slow), forward, backward, sync_s=sync, slow=dict(enumerate(slow))),),
        micro_batches,
        staleness,
        micro_batches,
        Rows(count, keys=count, slow=dict(enumerate(shards))),
        Costs(
            closing_s=closing,
            way_s=way,
            message_s=message,
            pull_s=pull,
            push_s=push,
            commit_s=commit,
        ),
    )
    found = simulate(training, steps, warm=0)
    assert np.cumsum(found.step_s) == pytest.approx(second.updated())


def test_one_worker_asks_computes_and_sends_in_turn() -> None:
    """Without staleness all of it, on the way there and back; with it the longer of both."""
    costs = Costs(way_s=1.0, message_s=2.0, pull_s=3.0, push_s=4.0, commit_s=5.0)
    training = Training((Stage(1, 10.0, 20.0),), 2, 0, 2, Rows(1, keys=1), costs)
    pull, send = 2 + 2 + 2 * 3, 2 + 2 + 2 * 4 + 2 + 2 + 2 * 5
    found = simulate(training, 3)
    assert found.step_s.tolist() == pytest.approx([pull + 60, *[send + pull + 60] * 2])
    found = simulate(replace(training, staleness=1), 12, warm=4)
    assert found.step_s.tolist() == pytest.approx([60.0] * 8)
    serving = simulate(replace(training, staleness=1), 12).serving
    busy = 12 * (2 + 6) + 11 * (2 + 8 + 2 + 10)
    assert serving == pytest.approx(busy / (pull + 12 * 60), rel=0.1)


def test_workers_queue_at_a_shard_and_more_shards_end_that() -> None:
    costs = Costs(pull_s=1.0)
    training = Training((Stage(4, 1.0, 1.0),), 4, 0, 4, Rows(1, keys=2), costs)
    assert simulate(training, 5).step_s.tolist() == pytest.approx([10.0] * 5)
    wider = replace(training, rows=Rows(2, keys=2))
    assert simulate(wider, 5).step_s.tolist() == pytest.approx([6.0] * 5)
    slow = replace(training, rows=Rows(2, keys=2, slow={1: 3.0}))
    assert simulate(slow, 5).step_s.tolist() == pytest.approx([14.0] * 5)


def test_priced_rows_wait_for_others_alone() -> None:
    rows = Rows(1, keys=2, priced=True)
    training = Training((Stage(4, 1.0, 1.0),), 4, 0, 4, rows, Costs(pull_s=1.0))
    assert simulate(training, 5).step_s.tolist() == pytest.approx([8.0] * 5)
    alone = replace(training, stages=(Stage(1, 1.0, 1.0),), micro_batches=1)
    assert simulate(alone, 5).step_s.tolist() == pytest.approx([2.0] * 5)


def test_shared_cores_take_turns() -> None:
    training = Training((Stage(6, 1.0, 1.0),), 6, 0, 6, costs=Costs(closing_s=0.5))
    assert simulate(training, 4).step_s.tolist() == pytest.approx([2.5] * 4)
    # In turn at first; from then on each is where it was in the queue.
    shared = simulate(replace(training, cores=2), 4)
    assert shared.step_s[0] == pytest.approx(2 + 3 * 0.5)
    parts = replace(training, costs=Costs(part_s=1.0), cores=1)
    assert simulate(parts, 1).step_s[0] == pytest.approx(max(2 + 0.5 * 7, 6.0))


def test_links_of_hosts_are_shared() -> None:
    """Two workers of a host send to the next stage in turn, those of two hosts at once."""
    stages = (Stage(2, 1.0, 1.0, pass_bytes=4.0, per_host=2), Stage(2, 1.0, 1.0))
    training = Training(stages, 2, 0, 2, host_bytes_s=1.0)
    assert simulate(training, 1).step_s[0] == pytest.approx(1 + 8 + 8 + 1, rel=1e-6)
    apart = replace(training, stages=(replace(stages[0], per_host=1), stages[1]))
    assert simulate(apart, 1).step_s[0] == pytest.approx(1 + 4 + 2 + 4 + 1, rel=1e-6)


def test_a_sum_goes_round_twice() -> None:
    assert ring_s(1, 1e9, 1.0, 1.0) == 0
    assert ring_s(4, 0, 0.5, math.inf) == pytest.approx(3.0)
    # 1 MiB in two segments: both go over each link twice.
    assert ring_s(2, 1 << 20, 0.0, 1 << 19) == pytest.approx(4.0)
    training = Training((Stage(3, 1.0, 1.0, sum_bytes=8.0),), 3, 0, 3, costs=Costs(hop_s=0.25))
    assert simulate(training, 2).step_s.tolist() == pytest.approx([3.0] * 2)


def test_the_slowest_of_many_is_what_a_step_takes() -> None:
    """Against draws of NumPy's: the mean of the greatest of k log-normal times."""
    noise, k = 0.1, 32
    training = Training((Stage(k, 0.0, 1.0),), k, 0, k, noise=noise)
    sigma = math.sqrt(math.log1p(noise**2))
    rng = np.random.default_rng(0)
    greatest = rng.lognormal(-(sigma**2) / 2, sigma, (20_000, k)).max(1).mean()
    assert simulate(training, 3000).step_s.mean() == pytest.approx(greatest, rel=0.005)
    assert greatest > 1.2


@pytest.mark.parametrize("cut", [0, 4])
def test_kills_cost_what_theory_says(cut: int) -> None:
    """A step, or those since a cut, done again: exp(r L) (exp(r s) - 1) / r, L the wait.

    A kill during a wait has it begin anew.
    """
    rate, lost, step = 0.05, 3.0, 2.0
    kill = Kill(3600 * rate, lost, back=cut > 0)
    training = Training((Stage(1, 1.0, 1.0),), 1, 0, 1, kills=(kill,), cut_every=cut or 1)
    found = simulate(training, 12_000, seed=5)
    whole = step * (cut or 1)
    expected = math.exp(rate * lost) * math.expm1(rate * whole) / rate / (cut or 1)
    assert found.seconds / 12_000 == pytest.approx(expected, rel=0.03)
    assert found.backwards == 12_000
    assert found.kills == pytest.approx(found.seconds * rate, rel=0.05)


def test_a_kill_after_which_nothing_gets_done_is_told() -> None:
    training = Training((Stage(1, 1.0, 1.0),), 1, 0, 1, kills=(Kill(3600 * 20.0, 1.0),))
    with pytest.raises(RuntimeError, match="no step gets done"):
        simulate(training, 50)


_any_training = st.builds(
    lambda stages, micro_batches, staleness, rows, noise, kills, cores, tell: replace(
        _training(stages, micro_batches, staleness),
        rows=Rows(rows, keys=4) if rows else None,
        costs=Costs(
            part_s=0.1,
            closing_s=0.3,
            end_s=0.2,
            tell_s=tell,
            hop_s=0.1,
            way_s=0.1,
            client_message_s=0.05,
            client_pull_s=0.05,
            client_push_s=0.05,
            message_s=0.1,
            pull_s=0.1,
            push_s=0.1,
            commit_s=0.1,
        ),
        noise=noise,
        kills=(Kill(kills, 5.0), Kill(kills / 2, 9.0, back=True)) if kills else (),
        cut_every=3,
        cores=cores,
    ),
    _stages,
    st.integers(1, 6),
    st.integers(0, 2),
    st.sampled_from([0, 1, 3]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 20.0]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([0.0, 0.02]),
)


@settings(max_examples=150)
@given(_any_training, st.integers(1, 12), st.integers(0, 3))
def test_nothing_is_lost_and_nothing_made_up(training: Training, steps: int, seed: int) -> None:
    found = simulate(training, steps, warm=0, seed=seed)
    for shares in (found.spent, *found.by_stage):
        assert sum(shares.values()) == pytest.approx(1.0)
        assert min(shares.values()) >= -1e-12
    assert found.backwards == steps * training.micro_batches * len(training.stages)
    assert (found.step_s >= 0).all()  # steps of two workers may end at one moment
    assert found.step_s.sum() == pytest.approx(found.seconds)
    assert found.serving <= 1 + 1e-9
    if not training.kills and not training.noise:
        each = [(s.forward_s + s.backward_s) * training.micro_batches for s in training.stages]
        computing = [
            shares["computing"] * stage.units * found.seconds
            for shares, stage in zip(found.by_stage, training.stages, strict=True)
        ]
        assert computing == pytest.approx([seconds * steps for seconds in each])
        assert found.spent["lost"] == 0


@settings(max_examples=60)
@given(_any_training, st.integers(1, 8), st.integers(0, 3))
def test_a_seed_gives_one_run(training: Training, steps: int, seed: int) -> None:
    first, second = (simulate(training, steps, seed=seed) for _ in range(2))
    assert first.step_s.tolist() == second.step_s.tolist()
    assert first.spent == second.spent


def test_another_seed_gives_another_run() -> None:
    training = Training((Stage(3, 1.0, 2.0),), 3, 0, 3, noise=0.1)
    assert simulate(training, 9).step_s.tolist() != simulate(training, 9, seed=1).step_s.tolist()


@settings(max_examples=200)
@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(0, 2),
    st.integers(1, 3),
    st.data(),
)
def test_nothing_gets_faster_by_what_gets_slower(
    units: int, micro_batches: int, staleness: int, shards: int, data
) -> None:
    """One stage: a time that grows, a worker or shard that slows costs time or nothing.

    But for what another order of messages at a shard may save: queues have Graham's anomalies.
    """
    training = Training(
        (Stage(units, 1.0, 2.0, sync_s=0.1, slow={0: 1.5}),),
        micro_batches,
        staleness,
        micro_batches,
        Rows(shards, keys=3, slow={0: 1.1}),
        Costs(0.1, 0.2, 0.1, 0.01, 0.1, 0.1, 0.02, 0.03, 0.03, 0.05, 0.07, 0.07, 0.07),
        noise=data.draw(st.sampled_from([0.0, 0.2])),
    )
    costs, stage = training.costs, training.stages[0]
    more = data.draw(
        st.sampled_from(["forward_s", "sync_s", "slow", "shard", *Costs.__dataclass_fields__])
    )
    if more == "shard":
        slower = replace(training, rows=replace(training.rows, slow={0: 2.2}))
    elif more == "slow":
        slower = replace(training, stages=(replace(stage, slow={0: 1.5, units - 1: 2.5}),))
    elif more in ("forward_s", "sync_s"):
        longer = replace(stage, **{more: 1.5 * getattr(stage, more)})
        slower = replace(training, stages=(longer,))
    else:
        slower = replace(training, costs=replace(costs, **{more: 1.7 * getattr(costs, more)}))
    assert simulate(slower, 9).seconds >= simulate(training, 9).seconds * 0.98


def test_a_thousand_workers_and_two_hundred_shards_take_seconds() -> None:
    """That it ends is what is asserted; bench.scale says how long it takes."""
    costs = Costs(message_s=2e-5, pull_s=1e-7, push_s=1e-7, commit_s=1e-7, way_s=1e-4)
    training = Training(
        (Stage(1000, 0.02, 0.04),), 1000, 1, 1000, Rows(200, keys=5000), costs, noise=0.05
    )
    found = simulate(training, 20)
    assert found.backwards == 20_000
    assert 1000 / 0.2 < found.throughput < 1000 / 0.05


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"micro_batches": 0}, "micro-batches"),
        ({"stages": (Stage(0, 1.0, 1.0),)}, "units"),
        ({"micro_batches": 1 << 29}, "too many"),
    ],
)
def test_what_cannot_be_simulated_is_refused(change, error: str) -> None:
    training = Training((Stage(1, 1.0, 1.0),), 1, 0, 1)
    with pytest.raises(ValueError, match=error):
        simulate(replace(training, **change), 4)
