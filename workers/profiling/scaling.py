"""How a time falls with the number of units: t(k) = t1 (1 - a + a / k), fitted by least squares.

The form is the cost model's (Amdahl's law, as the HeterPS paper has it): `a` is the fraction of
the time on one unit that divides by the number of units.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_MAD_TO_DEVIATION = 1.4826  # of a normal distribution


@dataclass(frozen=True, slots=True)
class Scaling:
    """A time and how it divides over units.

    Args:
        seconds: on one unit, t1.
        parallel: the fraction that divides, a, in [0, 1].
        deviation: relative standard deviation: of repeated measurement, and of the fit.
    """

    seconds: float
    parallel: float
    deviation: float = 0.0

    def at(self, units: int) -> float:
        """Seconds on `units` units."""
        return self.seconds * (1.0 - self.parallel + self.parallel / units)


NOTHING = Scaling(0.0, 0.0)  # what takes no time


def fit_scaling(samples: Mapping[int, ArrayLike]) -> Scaling:
    """Fit repeated timings by number of units.

    Each number of units counts by its median and, as noise grows with the time, by relative
    error. From one number of units alone nothing is known of the fraction: it is taken as 1.

    Args:
        samples: units -> seconds [repeats], at least one number of units.
    """
    units = sorted(samples)
    timings = [np.asarray(samples[k], dtype=np.float64) for k in units]
    medians = np.array([np.median(t) for t in timings])
    if not medians[0] > 0:
        return NOTHING
    spread = math.sqrt(sum(relative_deviation(t) ** 2 for t in timings) / len(timings))
    if len(units) == 1:
        return Scaling(float(medians[0]), 1.0, spread)
    fixed, divided = _least_squares(1.0 / np.array(units, dtype=np.float64), medians)
    fitted = fixed + divided / np.array(units)
    floor = np.maximum(medians, 1e-12)
    residual = math.sqrt(float(np.mean(((fitted - medians) / floor) ** 2)))
    total = fixed + divided
    return Scaling(total, divided / total, math.hypot(spread, residual))


def combined(parts: Sequence[Scaling]) -> Scaling:
    """Times that follow one another, as one."""
    total = sum(part.seconds for part in parts)
    if not total > 0:
        return NOTHING
    return Scaling(
        seconds=total,
        parallel=sum(part.seconds * part.parallel for part in parts) / total,
        deviation=math.sqrt(sum((part.seconds * part.deviation) ** 2 for part in parts)) / total,
    )


def relative_deviation(timings: NDArray[np.float64]) -> float:
    """Relative standard deviation [repeats] by the median absolute deviation.

    A single pause of the host does not move it.
    """
    median = float(np.median(timings))
    if not median > 0:
        return 0.0
    return _MAD_TO_DEVIATION * float(np.median(np.abs(timings - median))) / median


def _least_squares(share: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Fixed and divided part, neither below 0, of least relative squared error."""
    weight = 1.0 / np.maximum(seconds, 1e-12)
    design = np.stack([weight, weight * share], axis=1)
    ones = weight * seconds
    (fixed, divided), *_ = np.linalg.lstsq(design, ones, rcond=None)
    if fixed >= 0 and divided >= 0:
        return float(fixed), float(divided)
    # With two non-negative unknowns the optimum else lies on an edge.
    edges = [float(column @ ones / (column @ column)) for column in design.T]
    errors = [
        float(np.sum((column * edge - ones) ** 2))
        for column, edge in zip(design.T, edges, strict=True)
    ]
    return (edges[0], 0.0) if errors[0] <= errors[1] else (0.0, edges[1])
