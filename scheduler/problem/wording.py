"""Figures inside sentences: rounded as far as a reader needs, never to a value that misleads."""

import math
from collections.abc import Sequence


def rate_text(samples_per_s: float, *, down: bool = False) -> str:
    """Samples a second to whole numbers, below 1,000 to four digits.

    Args:
        down: round down, so that a floor set to the figure shown can be met.
    """
    if not math.isfinite(samples_per_s) or samples_per_s <= 0:
        return f"{samples_per_s:,.0f}"
    digits = max(0, 3 - math.floor(math.log10(samples_per_s)))
    if down:
        scale = 10.0**digits
        samples_per_s = math.floor(samples_per_s * scale * (1 + 1e-10)) / scale
    text = f"{samples_per_s:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def money_text(dollars: float, *, up: bool = False) -> str:
    """Dollars to the cent, below a dollar to two digits.

    Args:
        up: round up, so that a cap set to the figure shown can be kept.
    """
    if not math.isfinite(dollars):
        return "no price"
    digits = 2 if dollars >= 1 or dollars <= 0 else 1 - math.floor(math.log10(dollars))
    if up:
        # What is a rounding error above the figure shown stays at it.
        scale = 10.0**digits
        dollars = math.ceil(dollars * scale * (1 - 1e-10)) / scale
    return f"${dollars:,.{digits}f}"


def hours_text(hours: float) -> str:
    """A time of hours, as 12.5 min."""
    for unit, scale in (("h", 1.0), ("min", 1 / 60), ("s", 1 / 3600)):
        if hours >= scale or unit == "s":
            return f"{hours / scale:,.3g} {unit}" if hours < 1000 else f"{hours:,.0f} h"
    return ""


def units_text(number: int, kind: str) -> str:
    """A number of units of a type."""
    return f"{number:,} unit{'s' * (number != 1)} of {kind}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Names in quotes, the first `most` of them."""
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def sentence(text: str) -> str:
    """The text with a full stop."""
    return text if text.endswith(".") else text + "."


def time_text(seconds: float) -> str:
    """Return a time a person can read, as 3.1 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def buffers_changed(names: Sequence[str]) -> str:
    """Why layers are in a stage of one unit."""
    return f"{listed(names)} {'changes' if len(names) == 1 else 'change'} a buffer in forward"
