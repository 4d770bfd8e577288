"""Fits of synthetic timings: what went in comes out, within bounds, whatever the noise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.profiling.scaling import NOTHING, Scaling, combined, fit_scaling

UNITS = (1, 2, 4, 8)


def timings(seconds, parallel, noise=0.0, repeats=9, seed=0):
    rng = np.random.default_rng(seed)
    exact = Scaling(seconds, parallel)
    return {k: exact.at(k) * np.exp(noise * rng.standard_normal(repeats)) for k in UNITS}


@given(st.floats(1e-6, 1e3), st.floats(0.0, 1.0))
def test_an_exact_curve_is_recovered(seconds, parallel):
    fit = fit_scaling(timings(seconds, parallel))
    assert fit.seconds == pytest.approx(seconds, rel=1e-6)
    assert fit.parallel == pytest.approx(parallel, abs=1e-6)
    assert fit.deviation == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("parallel", [0.1, 0.5, 0.9])
def test_noise_is_averaged_out_and_told(parallel):
    fit = fit_scaling(timings(0.02, parallel, noise=0.05, repeats=25))
    assert fit.seconds == pytest.approx(0.02, rel=0.06)
    assert fit.parallel == pytest.approx(parallel, abs=0.06)
    assert 0.02 < fit.deviation < 0.1


def test_one_pause_of_the_host_moves_nothing():
    calm = timings(0.02, 0.8, noise=0.02)
    paused = {k: np.where(np.arange(len(t)) == 3, 50 * t, t) for k, t in calm.items()}
    assert fit_scaling(paused).seconds == pytest.approx(fit_scaling(calm).seconds, rel=0.03)
    assert fit_scaling(paused).parallel == pytest.approx(fit_scaling(calm).parallel, abs=0.03)


@pytest.mark.parametrize(
    ("medians", "parallel"),
    [
        ({1: 1.0, 2: 1.2, 4: 1.5}, 0.0),  # more workers only disturb each other
        ({1: 1.0, 2: 0.4, 4: 0.15}, 1.0),  # smaller shares fit the cache
    ],
)
def test_what_no_fraction_explains_stays_in_bounds_and_is_unsure(medians, parallel):
    fit = fit_scaling({k: [v] * 5 for k, v in medians.items()})
    assert fit.parallel == parallel
    assert fit.deviation > 0.05

    # No other time fits better where the fraction is at its bound.
    def error(seconds):
        return sum((Scaling(seconds, parallel).at(k) / v - 1) ** 2 for k, v in medians.items())

    assert error(fit.seconds) <= min(error(fit.seconds * f) for f in (0.97, 1.03))


@given(st.lists(st.floats(1e-6, 1e3), min_size=4, max_size=4))
def test_any_timings_give_a_curve_of_the_model(medians):
    fit = fit_scaling({k: [v] for k, v in zip(UNITS, medians, strict=True)})
    assert 0.0 <= fit.parallel <= 1.0
    assert min(medians) / 8 <= fit.seconds <= 8 * max(medians)


def test_nothing_and_one_number_of_units():
    assert fit_scaling({1: [0.0] * 3, 2: [0.0] * 3}) == NOTHING
    assert fit_scaling({1: [2.0, 2.0]}) == Scaling(2.0, 1.0)


@given(
    st.lists(st.tuples(st.floats(1e-3, 10), st.floats(0, 1)), min_size=1, max_size=5),
    st.sampled_from(UNITS),
)
def test_combined_times_take_as_long_as_their_parts(parts, units):
    scalings = [Scaling(*part) for part in parts]
    total = sum(part.at(units) for part in scalings)
    assert combined(scalings).at(units) == pytest.approx(total, rel=1e-9)


def test_combining_nothing_is_nothing():
    assert combined([]) == combined([NOTHING]) == NOTHING
