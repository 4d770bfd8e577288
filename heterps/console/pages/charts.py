"""Charts of a job's history: loss, samples a second, keys a second of its shards."""

from collections.abc import Callable, Sequence

from heterps.html.markup import Markup, join, tag
from heterps.html.parts import details, table
from heterps.html.plot import Plot
from heterps.html.scale import Axis
from heterps.view.figures import count, duration, rate
from heterps.view.table import Column

_HEIGHT_PX = 170.0
_MOST_ROWS = 60
Series = Sequence[tuple[float, float]]


def over_time(
    title: str,
    series: Sequence[tuple[str, str, Series]],
    text: Callable[[float], str],
    level: tuple[float, str] | None = None,
    zero: bool = True,
    marks: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Lines over the seconds of a run.

    Args:
        series: name, class and points (seconds, value) of each.
        text: a value in words.
        level: a value to compare with, and its name.
        zero: whether the axis of values begins at 0.
        marks: seconds at which something happened, and what.
    """
    points = [point for _, _, line in series for point in line]
    values = [value for _, value in points] + ([level[0]] if level is not None else [])
    names = [name for name, _, _ in series]
    told = "; ".join(
        f"{name + ' ' if len(series) > 1 else ''}from {text(line[0][1])} to {text(line[-1][1])}"
        for name, _, line in series
    )
    happened = "".join(f" At {elapsed(at)}: {what}." for at, what in marks)
    plot = Plot(
        title,
        f"{told}, over {duration(points[-1][0])}.{happened}",
        Axis.around([at for at, _ in points], zero=True, most=4),
        Axis.around(values, zero=zero, most=4),
        "time in training, min:s",
        title,
        elapsed,
        text,
        _HEIGHT_PX,
    )
    if level is not None:
        plot.level(level[0], "limit", level[1])
    for at, what in marks:
        plot.upright(at, "limit", what)
    for name, kind, line in series:
        plot.line(line, f"curve {kind}")
        plot.point(*line[-1], f"dot {kind}", 3.5, f"{name}: {text(line[-1][1])}")
    legend = [
        tag("span", tag("i", class_=kind, aria_hidden="true"), name) for name, kind, _ in series
    ]
    rows = _rows([line for _, _, line in series], text)
    columns: tuple[str | Column, ...] = ("time", *(Column(name, number=True) for name in names))
    numbers = table(f"{title} as a table", columns, rows, stacked=False)
    return tag(
        "div",
        join(
            tag("p", *legend, class_="legend") if len(series) > 1 else None,
            plot.draw(),
            details(f"{title} as a table", numbers),
        ),
        class_="chart",
    )


def elapsed(seconds: float) -> str:
    """A time on an axis: 0:05, 12:00, 1:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def loss_text(value: float) -> str:
    """A loss."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.4g}"


def rate_text(value: float) -> str:
    """Samples or keys a second on an axis."""
    return count(value) if value >= 1e4 else rate(value) if value else "0"


def _rows(lines: Sequence[Series], text: Callable[[float], str]) -> list[tuple[str, ...]]:
    step = max(1, -(-len(lines[0]) // _MOST_ROWS))
    return [
        (elapsed(points[0][0]), *(text(value) for _, value in points))
        for points in list(zip(*lines, strict=False))[::step]
    ]
