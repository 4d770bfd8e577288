"""Predicted against measured: of the whole run, and of each stage."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.palette import Palette
from heterps.html.parts import bars, table
from heterps.view.figures import money, per_sample_in, rate
from heterps.view.plan import layers_text

if TYPE_CHECKING:
    from scheduler import Decision

_COLUMNS = ("", "*predicted above, measured below", ">predicted", ">measured", ">ratio")


def measured(decision: "Decision", palette: Palette) -> Markup:
    """A row a figure, then a row a stage."""
    found = decision.measured
    assert found is not None
    rows = [
        _row("throughput, samples/s", decision.throughput, found.throughput, rate, ""),
        _row("price an hour", decision.price_per_hour, found.price_per_hour, money, ""),
        _row("cost of the training", decision.cost, found.cost, money, ""),
    ]
    busy = [*(stage.compute_s for stage in decision.stages), *found.stage_s]
    times = per_sample_in(max(busy, default=0.0))
    for number, (stage, busy_s) in enumerate(zip(decision.stages, found.stage_s, strict=False)):
        name = join(
            f"stage {number} computing a sample ",
            tag("small", layers_text(decision, stage.first, stage.last)),
        )
        rows.append(_row(name, stage.compute_s, busy_s, times, palette.of(stage.type)))
    return table("Predicted and measured figures", _COLUMNS, rows)


def _row(
    name: str, before: float, after: float, text: Callable[[float], str], colour: str
) -> tuple[str, ...]:
    most = max(before, after) or 1.0
    drawn = bars(((before / most, "bar rest", ""), (after / most, "bar", colour)))
    ratio = f"{after / before:.2f}" if before else "-"
    return name, drawn, text(before), text(after), ratio
