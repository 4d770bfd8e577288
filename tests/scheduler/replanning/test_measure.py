"""What the windows of a run come to: the filter, and how progress is cut into windows."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import scheduler_pb2 as pb
from scheduler.decision.record import Measured
from scheduler.replanning.measure import (
    CLIP,
    GAIN,
    HALF_LIFE,
    MIN_WINDOWS,
    WINDOW_S,
    Filtered,
    LogFilter,
    Mark,
    Measurement,
    Steady,
    Windows,
)

times = st.floats(1e-9, 1e3)
EACH_S = 2.0


def filtered(*values: float) -> Filtered:
    found = LogFilter()
    for value in values:
        found.add(value)
    return found.filtered


@given(times, st.integers(MIN_WINDOWS, 60))
def test_a_constant_is_its_own_estimate(value: float, windows: int) -> None:
    found = filtered(*[value] * windows)
    assert found.counts
    assert found.windows == windows
    assert found.seconds == pytest.approx(value)
    assert found.spread == pytest.approx(0.0, abs=1e-9)


@given(times, st.floats(1e-3, 1e3))
def test_a_lasting_change_is_followed_however_large(value: float, factor: float) -> None:
    found = filtered(*[value] * 20, *[value * factor] * 400)
    assert found.seconds == pytest.approx(value * factor, rel=0.01)


@given(st.lists(st.floats(0.5, 2.0), min_size=MIN_WINDOWS, max_size=40), times)
def test_one_window_moves_the_estimate_by_a_bounded_part(
    values: list[float], outlier: float
) -> None:
    before = filtered(*values).seconds
    after = filtered(*values, outlier).seconds
    assert abs(math.log(after / before)) <= GAIN * math.log(CLIP) + 1e-12
    assert (after - before) * (outlier - before) >= -1e-12


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_outliers_among_the_first_windows_do_not_matter(low: float, high: float) -> None:
    assert filtered(1.0, low, 1.0, high, 1.0).seconds == pytest.approx(1.0)


@given(st.lists(st.floats(1e-3, 1e3), min_size=MIN_WINDOWS, max_size=40), st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(values: list[float], unit: float) -> None:
    whole = filtered(*(value * unit for value in values))
    assert whole.seconds == pytest.approx(filtered(*values).seconds * unit)


def test_half_of_a_small_change_is_taken_over_in_a_half_life() -> None:
    found = filtered(*[1.0] * MIN_WINDOWS, *[1.2] * round(HALF_LIFE))
    assert math.log(found.seconds) == pytest.approx(0.5 * math.log(1.2))


@pytest.mark.parametrize("windows", range(MIN_WINDOWS))
def test_few_windows_do_not_count(windows: int) -> None:
    found = filtered(*[1.0] * windows)
    assert not found.counts
    assert (found.windows, found.seconds) == (windows, 0.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number above 0"):
        LogFilter().add(value)


def run(windows: Windows, stage: int, busy: list[float], start_s: float = 0.1) -> None:
    """Report 10 steps of 100 samples in each `EACH_S`, the stage busy for `busy` of each."""
    total = 0.0
    windows.add(stage, Mark(0, 0, 0.0, start_s))
    for number, share in enumerate(busy, 1):
        total += share * EACH_S
        windows.add(stage, Mark(10 * number, 1000 * number, total, start_s + number * EACH_S))


def test_busy_time_and_pace_are_told_apart_by_stage() -> None:
    windows = Windows(2)
    run(windows, 0, [0.9, *[0.25] * 6])  # the first window is warm-up
    run(windows, 1, [0.9, *[0.50] * 7])
    found = windows.measurement
    assert [one.windows for one in found.busy] == [6, 7]
    assert [one.seconds for one in found.busy] == pytest.approx(
        [0.25 * EACH_S / 1000, 0.5 * EACH_S / 1000]
    )
    assert found.pace.seconds == pytest.approx(EACH_S / 1000)
    assert found.counts


def test_short_windows_are_joined() -> None:
    windows = Windows(1)
    for number in range(1, 401):  # a tenth of a window, one step, each
        mark = Mark(number, 10 * number, number * 0.05 * WINDOW_S, number * 0.1 * WINDOW_S)
        windows.add(0, mark)
    found = windows.measurement
    assert 30 <= found.pace.windows <= 40
    assert found.busy[0].seconds == pytest.approx(0.005 * WINDOW_S)


def test_a_window_has_steps_enough() -> None:
    windows = Windows(1)
    for number in range(40):
        windows.add(0, Mark(number, 10 * number, 1.0 * number, 5.0 * WINDOW_S * (number + 1)))
    assert windows.measurement.pace.windows == 8  # of 9 times 4 steps the first is warm-up


def test_a_worker_that_begins_again_is_not_measured_across() -> None:
    windows = Windows(1)
    run(windows, 0, [0.5] * 3)
    run(windows, 0, [0.5] * 5)
    found = windows.measurement
    assert found.pace.windows == 2 + 4
    assert found.busy[0].seconds == pytest.approx(0.5 * EACH_S / 1000)


def test_steady_steps_come_after_the_first_window_and_those_of_before_it_began_again_are_out() -> (
    None
):
    windows = Windows(2)
    assert windows.steady == Steady()
    run(windows, 0, [0.5] * 9)  # the pipeline's pace is that of its last stage
    assert windows.steady == Steady()
    run(windows, 1, [0.5] * 11)
    assert windows.steady.steps == 100
    assert windows.steady.samples_per_s == pytest.approx(1000 / EACH_S)
    windows.add(1, Mark(115, 11_500, 9.0, 0.1 + 11.5 * EACH_S))  # too short for a window
    assert windows.steady.steps == 105
    run(windows, 1, [0.5])
    assert windows.steady.steps == 0


def test_a_stage_that_has_not_begun_or_is_unknown_tells_nothing() -> None:
    windows = Windows(1)
    windows.add(0, Mark(0, 0, 0.0, 0.0))
    windows.add(7, Mark(10, 10, 1.0, 10.0))
    assert not windows.measurement.counts


def test_an_ended_run_counts_by_its_length() -> None:
    def run_of(seconds: float) -> Measurement:
        return Measurement.of_run(Measured(200.0, 1.0, 1.0, seconds, False, (0.001, 0.0)))

    long = run_of(MIN_WINDOWS * WINDOW_S)
    assert (long.busy[0].seconds, long.pace.seconds) == (0.001, 0.005)
    assert [one.counts for one in long.busy] == [True, False]
    assert not run_of(1.0).counts
    # An attempt of a second tells no more because those before it were long.
    attempt = Measured(200.0, 1.0, 1.0, 5000.0, False, (0.001, 0.0), throughput_s=1.0)
    assert not Measurement.of_run(attempt).counts


def test_a_measurement_survives_its_message() -> None:
    found = Measurement((Filtered(7, 1e-3, 0.1), Filtered(2)), Filtered(9, 2e-3, 0.2))
    data = found.to_message().SerializeToString()
    assert Measurement.from_message(pb.Measurement.FromString(data)) == found
