"""Numbers as a person reads them."""

import math
from collections.abc import Callable


def rate(samples_per_s: float) -> str:
    """Samples a second."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 10 else f"{samples_per_s:.2g}"


def money(dollars: float) -> str:
    """Dollars with as many digits as matter."""
    if not math.isfinite(dollars):
        return "-"
    if dollars == 0 or dollars >= 1:
        return f"${dollars:,.2f}"
    return f"${dollars:.{1 - math.floor(math.log10(dollars))}f}"


def per_sample(seconds: float) -> str:
    """Seconds a sample, in the unit that suits."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1 or unit == "µs":
            return f"{seconds * factor:.2f} {unit}"
    return ""


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if 0 < seconds < 0.00995:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def percent(fraction: float) -> str:
    """A share or a gap, with two digits where it is small."""
    if not math.isfinite(fraction):
        return "-"
    if abs(fraction) < 5e-6:
        return "0%"
    return f"{fraction:.{0 if abs(fraction) >= 0.1 else 1 if abs(fraction) >= 0.01 else 2}%}"


def count(number: float) -> str:
    """A number of things; large ones in thousands and millions."""
    for least, scale, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= least:
            scaled = number / scale
            return f"{scaled:,.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"
    return f"{number:,.0f}"


def per_sample_in(largest_s: float) -> Callable[[float], str]:
    """Seconds a sample in one unit for a whole column, the one that suits its largest figure."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")):
        if largest_s * factor >= 0.1 or unit == "ns":
            break
    return lambda seconds: f"{seconds * factor:.2f} {unit}"
