"""How often something is done: after so many steps, or after so much time."""

import re
from dataclasses import dataclass

_STEPS = re.compile(r"([0-9]+) *steps?")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([smh])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
EXPECTED = "a time or a number of steps above 0, such as 30s, 5m, 1h or 200 steps"


@dataclass(frozen=True, slots=True)
class Interval:
    """One of them is above 0."""

    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, text: str) -> "Interval":
        """Read a text such as `200 steps`, `30s`, `5m` or `1h`.

        Raises:
            ValueError: it is none; says what was expected.
        """
        if steps := _STEPS.fullmatch(text.strip()):
            found = cls(steps=int(steps[1]))
        elif time := _TIME.fullmatch(text.strip()):
            found = cls(seconds=float(time[1]) * _SECONDS[time[2]])
        else:
            raise ValueError(f"{text!r}: expected {EXPECTED}")
        if not (found.steps or found.seconds):
            raise ValueError(f"{text!r}: expected {EXPECTED}")
        return found
