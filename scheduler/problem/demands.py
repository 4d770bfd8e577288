"""What a plan must keep to: a floor on throughput, a deadline, a cap on price, pins, exclusions."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from scheduler.problem.cost import CostModel
from scheduler.problem.fields import InputError
from scheduler.problem.interruptions import Expected
from scheduler.problem.steps import Steps
from scheduler.problem.workload import Resources, Workload

Pin = Mapping[str, str] | Sequence[str] | None

_MOST: Final = 1e100  # samples/s, far from where numbers end
_TIME: Final = re.compile(r"(\d+\.?\d*|\.\d+)\s*(s|m|min|h|d)?")
_HOURS: Final = {"s": 1 / 3600, "m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0}


@dataclass(frozen=True, slots=True)
class Demands:
    """The demands on one plan, checked.

    `min_throughput` is in samples/s and already what the deadline `finish_by` (hours for all
    samples, 0 for none) asks for; `max_price_per_hour` is infinite where there is no cap.
    """

    min_throughput: float = 0.0
    max_price_per_hour: float = math.inf
    pin: Mapping[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    finish_by: float = 0.0

    @classmethod
    def check(
        cls,
        workload: Workload,
        min_throughput: float | None = None,
        max_price_per_hour: float | None = None,
        finish_by: float | str | None = None,
        pin: Pin = None,
        exclude: Sequence[str] = (),
    ) -> "Demands":
        """Check the arguments of `plan`; None stands for no demand.

        Raises:
            InputError: naming argument, value and what was expected.
        """
        floor, cap, hours = 0.0, math.inf, 0.0
        if min_throughput is not None:
            expected = f"samples/s, a finite number from 0 to {_MOST:g}"
            floor = _number("min_throughput", min_throughput, expected, above=False)
            if floor > _MOST:
                raise InputError("", "min_throughput", f"{min_throughput!r}: expected {expected}")
        if max_price_per_hour is not None:
            expected = "dollars an hour, a finite number above 0"
            cap = _number("max_price_per_hour", max_price_per_hour, expected)
        if finish_by is not None:
            hours = hours_of("finish_by", finish_by)
        if hours:
            floor = max(floor, workload.samples / (hours * 3600))
            if not floor <= _MOST:
                expected = "a time in which the samples can be counted"
                raise InputError("", "finish_by", f"{finish_by!r}: expected {expected}")
        if isinstance(exclude, str) or not all(isinstance(name, str) for name in exclude):
            raise InputError("", "exclude", f"{exclude!r}: expected a list of types")
        names = [layer.name for layer in workload.layers]
        if not isinstance(pin, Mapping) and pin is not None:
            if isinstance(pin, str) or len(pin) != len(names):
                expected = f"one type for each of the {len(names)} layers, or types by layer"
                raise InputError("", "pin", f"{pin!r}: expected {expected}")
            pin = dict(zip(names, pin, strict=True))
        return cls(floor, cap, dict(pin or {}), tuple(dict.fromkeys(exclude)), hours)

    def aim(self, overhead: float) -> float:
        """The throughput that a plan is made for, where so much of the time is the executor's."""
        return self.min_throughput / (1 - overhead)

    @property
    def cap(self) -> float:
        """The cap on the price an hour, 0 for none, as messages and files have it."""
        return self.max_price_per_hour if math.isfinite(self.max_price_per_hour) else 0.0

    def model(
        self,
        workload: Workload,
        resources: Resources,
        cuts: bool | None = None,
        steps: Steps | None = None,
        expected: Expected | None = None,
    ) -> CostModel:
        """The cost model under these demands; `cuts`, `steps`, `expected` as of `CostModel`.

        Raises:
            InputError: they do not fit workload and resources.
        """
        return CostModel(
            workload,
            resources,
            self.pin or None,
            self.excluded,
            self.max_price_per_hour,
            cuts,
            steps,
            expected,
        )

    def to_json(self) -> dict[str, Any]:
        """The demands as plain values, in an order of their own."""
        return {
            "min_throughput": self.min_throughput,
            "max_price_per_hour": self.cap,
            "pin": dict(sorted(self.pin.items())),
            "excluded": sorted(self.excluded),
            **({"finish_by": self.finish_by} if self.finish_by else {}),
        }


def hours_of(key: str, value: float | str) -> float:
    """Return hours from a number of hours, or from text such as 90m, 2h, 1.5d, 45s.

    Raises:
        InputError: not a time above 0.
    """
    expected = "hours, a finite number above 0, or text such as 90m, 2h or 1.5d"
    if isinstance(value, str):
        found = _TIME.fullmatch(value.strip().lower())
        hours = float(found[1]) * _HOURS[found[2] or "h"] if found else 0.0
        if not (hours > 0 and math.isfinite(hours)):
            raise InputError("", key, f"{value!r}: expected {expected}")
        return hours
    return _number(key, value, expected)


def _number(key: str, value: object, expected: str, above: bool = True) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if good:
        assert isinstance(value, int | float)
        good = math.isfinite(value) and (value > 0 if above else value >= 0)
    if not good:
        raise InputError("", key, f"{value!r}: expected {expected}")
    assert isinstance(value, int | float)
    return float(value)
