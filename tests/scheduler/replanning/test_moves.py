"""When a running job moves by itself, and above all when it does not."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bench.moves import KEPT, drawn, replay, results
from scheduler import Decision, plan
from scheduler.replanning.measure import MIN_WINDOWS, Filtered, LogFilter, Measurement
from scheduler.replanning.moves import LEAST_WINDOWS, PAUSE_S, Answer, InARow, Past, decide
from scheduler.replanning.proposal import Moving, Proposal, Threshold
from scheduler.replanning.replan import propose
from tests.scheduler.instances import cost, resources, workload

OFFER = resources(cpu=(0.05, 200), gpu=(2.0, 8))
# On the GPU by the profile; were it 10 times slower there, CPU cores would be cheaper.
LAYERS = ({"cpu": cost(0.5)}, {"cpu": cost(20.0), "gpu": cost(0.1)})


def decided(floor: float = 0.0, **other: float) -> Decision:
    cpu = {"cpu": cost(20.0, **other), "gpu": cost(0.1)}
    work = workload(LAYERS[0], cpu, samples=1e9)
    return plan(work, OFFER, floor or None, method="exact")


def told(decision: Decision, *busy: float, spread: float = 0.05, windows: int = 50) -> Measurement:
    """Computing of each stage times `busy`; the pipeline as the slowest of them explains."""
    times = [f * stage.compute_s for f, stage in zip(busy, decision.stages, strict=True)]
    filtered = tuple(Filtered(windows, one, spread) for one in times)
    return Measurement(filtered, Filtered(windows, max(times), spread))


def judged(
    decision: Decision,
    measurement: Measurement,
    left: float = 5e8,
    past: Past | None = None,
    moving: Moving | None = None,
) -> Answer:
    found = propose(decision, measurement, left, moving=moving)
    return decide(found, measurement, past or Past())


def test_a_stage_that_is_much_slower_than_its_profile_is_left() -> None:
    decision = decided()
    assert judged(decision, told(decision, 1.0, 10.0)) is Answer.MOVE


def test_as_predicted_it_stays() -> None:
    decision = decided()
    assert judged(decision, told(decision, 1.0, 1.0)) is Answer.BEST


def test_what_pays_within_noise_alone_does_not_count() -> None:
    decision = decided()
    assert judged(decision, told(decision, 1.0, 10.0, spread=0.05)) is Answer.MOVE
    found = propose(decision, told(decision, 1.0, 10.0), 5e8)
    ratio = found.current_cost / found.proposed_cost
    spread = ratio**2 - 1  # of so noisy windows the mean may be off by more than what it saves
    noisy = told(decision, 1.0, 10.0, spread=spread)
    assert propose(decision, noisy, 5e8).worthwhile
    assert judged(decision, noisy) is Answer.UNSURE


def test_a_profile_that_is_not_sure_of_the_other_plan_does_not_count() -> None:
    sure, guess = decided(uncertainty=0.02), decided(uncertainty=0.9)
    measurement = told(sure, 1.0, 10.0)
    assert judged(sure, measurement) is Answer.MOVE
    assert propose(guess, measurement, 5e8).worthwhile
    assert judged(guess, measurement) is Answer.UNSURE


def test_two_considerations_in_a_row_must_say_so_whichever_plan_they_name() -> None:
    decision = decided()
    pays, stays = told(decision, 1.0, 10.0), told(decision, 1.0, 1.0)
    answers = []
    rule = InARow()
    for one in (pays, stays, pays, pays):
        answers.append(rule.consider(propose(decision, one, 5e8), one, Past()))
    assert answers == [Answer.AGAIN, Answer.BEST, Answer.AGAIN, Answer.MOVE]


def test_a_type_that_was_slow_where_it_ran_is_not_moved_to_with_more_layers() -> None:
    """The profile is wrong about the cores, and only one layer has run on them."""
    layers = ({"cpu": cost(2.0)}, {"cpu": cost(6.0), "gpu": cost(1.0)}, {"gpu": cost(2.0)})
    offer = resources(cpu=(0.05, 64), gpu=(1.0, 8))
    decision = plan(workload(*layers, samples=1e9), offer, method="exact", pin={"l1": "gpu"})
    decision = replace(decision, pin={})
    measurement = told(decision, 4.0, 1.0)
    likely = propose(decision, measurement, 5e8)
    careful = propose(decision, measurement, 5e8, cautious=True)
    assert likely.proposed.assignment[1] == "cpu"
    assert careful.proposed.assignment[1] == "gpu"
    faster = told(decision, 0.5, 1.0)
    believed = propose(decision, faster, 5e8, cautious=True).proposed.workload
    assert believed is not None
    assert believed.layers[1].cost["cpu"].compute_s == 6.0, "nor is it believed to be fast"


def test_few_windows_of_any_part_do_not_count() -> None:
    decision = decided()
    full = told(decision, 1.0, 10.0)
    few = replace(full.pace, windows=LEAST_WINDOWS - 1)
    assert judged(decision, replace(full, pace=few)) is Answer.MEASURE
    assert judged(decision, replace(full, busy=(few, full.busy[1]))) is Answer.MEASURE
    assert decide(propose(decision, full, 5e8), Measurement(), Past()) is Answer.MEASURE


def test_what_is_left_must_pay_for_the_move() -> None:
    decision = decided()
    measurement = told(decision, 1.0, 10.0)
    long = Moving(restart_s=3600.0 * 2000)
    assert judged(decision, measurement, moving=long) is Answer.BEST
    assert judged(decision, measurement, left=1e4) is Answer.BEST


@pytest.mark.parametrize("moves", [1, 2, 5])
def test_each_move_doubles_the_time_until_the_next(moves: int) -> None:
    decision = decided()
    measurement = told(decision, 1.0, 10.0)
    pause = PAUSE_S * 2 ** (moves - 1)
    assert judged(decision, measurement, past=Past(moves, 0.99 * pause)) is Answer.PAUSE
    assert judged(decision, measurement, past=Past(moves, 1.01 * pause)) is Answer.MOVE


def test_a_deadline_that_staying_keeps_is_not_missed_by_moving() -> None:
    work = workload({"cpu": cost(20.0), "gpu": cost(0.1)}, samples=1e9)
    offer = resources(cpu=(0.05, 20), gpu=(20.0, 2))
    pinned = plan(work, offer, method="exact", pin={"l0": "gpu"})
    decision = replace(pinned, pin={})
    measurement = told(decision, 1.0)
    found = propose(decision, measurement, 5e8)
    stay_s, go_s = (
        5e8 / one.throughput * found.overhead for one in (found.current, found.proposed)
    )
    assert go_s > 2 * stay_s, "it is cheaper and slower"
    assert judged(decision, measurement) is Answer.MOVE
    assert judged(decision, measurement, past=Past(left_s=1.01 * stay_s)) is Answer.LATE
    assert judged(decision, measurement, past=Past(left_s=2 * go_s)) is Answer.MOVE


def test_a_missed_floor_is_a_reason_once_it_is_sure() -> None:
    decision = decided(2000.0)
    slow = decision.throughput / (0.8 * 2000.0)
    sure = told(decision, *[slow] * len(decision.stages), spread=0.02)
    assert judged(decision, sure) is Answer.MOVE
    noisy = told(decision, *[slow] * len(decision.stages), spread=3.0)
    assert judged(decision, noisy) is not Answer.MOVE
    within = decision.throughput / (0.97 * 2000.0)
    assert judged(decision, told(decision, *[within] * len(decision.stages))) is not Answer.MOVE


def test_a_plan_that_is_not_feasible_is_none() -> None:
    top = decided().max_throughput
    decision = decided(0.99 * top)
    measurement = told(decision, *[3.0] * len(decision.stages))
    found = propose(decision, measurement, 5e8)
    assert not found.proposed.feasible
    assert decide(found, measurement, Past()) is Answer.BEST


def test_the_filters_error_is_what_repeated_runs_spread_by() -> None:
    for windows in (MIN_WINDOWS, 10, 40, 200):
        rng = np.random.default_rng(windows)
        found = []
        for _ in range(800):
            one = LogFilter()
            for _ in range(windows):
                one.add(float(rng.lognormal(0.0, 0.1)))
            found.append(one.filtered)
        spread = float(np.std([math.log(one.seconds) for one in found]))
        claimed = float(np.median([one.error for one in found]))
        assert 0.75 * spread < claimed < 1.3 * spread
    assert Filtered(MIN_WINDOWS - 1, 0.0, 0.1).error == math.inf


def test_noise_alone_never_moves_a_job() -> None:
    """The profile is right, and so is the plan; looked at hundreds of times."""
    decision = decided()
    rng = np.random.default_rng(1)
    moved = 0
    for _ in range(40):
        filters = [LogFilter() for _ in (*decision.stages, None)]
        for _ in range(10):
            for _ in range(8):
                machine = rng.normal(0, 0.15)
                for one in filters:
                    one.add(math.exp(machine + rng.normal(0, 0.15)))
            times = [stage.compute_s for stage in decision.stages]
            parts = [
                replace(one.filtered, seconds=one.filtered.seconds * seconds)
                for one, seconds in zip(filters, [*times, max(times)], strict=True)
            ]
            measurement = Measurement(tuple(parts[:-1]), parts[-1])
            moved += judged(decision, measurement, left=1e9) is Answer.MOVE
    assert moved == 0


def proposal_of(decision: Decision) -> Proposal:
    return propose(decision, told(decision, 1.0, 10.0), 5e8)


def test_the_threshold_is_the_callers() -> None:
    decision = decided()
    found = proposal_of(decision)
    measurement = told(decision, 1.0, 10.0)
    assert decide(found, measurement, Past(), Threshold(0.0, 0.99)) is Answer.UNSURE


def test_what_moves_took_before_replaces_the_defaults() -> None:
    assert Moving.as_before([], restart_s=7.0) == Moving(restart_s=7.0)
    assert Moving.as_before([3.0, 5.0], restart_s=7.0).seconds == 12.0


def test_a_replayed_job_keeps_what_the_optimum_saves_and_does_not_move_for_nothing() -> None:
    assert replay(drawn(1, pays=True)).kept >= KEPT
    assert not replay(drawn(1, pays=False)).moved_at


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 21, 41, 61, 81])
def test_of_twenty_jobs_all_save_and_none_moves_for_nothing(seed: int) -> None:
    paying = list(results(20, seed, pays=True))
    saved = sum(one.stay - one.auto for one in paying)
    assert saved >= KEPT * sum(one.stay - one.optimum for one in paying)
    assert all(one.kept > 0.5 for one in paying)
    assert not [one.seed for one in results(20, seed, pays=False) if one.moved_at]
