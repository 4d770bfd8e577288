"""Predicted against measured: of the whole run, and of each stage."""

from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.palette import Palette
from heterps.html.parts import bars, table
from heterps.view import decision as view
from heterps.view.figures import per_sample_in
from heterps.view.steps import floor_note

if TYPE_CHECKING:
    from scheduler import Decision

_COLUMNS = ("", "*predicted above, measured below", ">predicted", ">measured", ">ratio")


def measured(decision: "Decision", palette: Palette) -> Markup:
    """A row a figure, then a row a stage."""
    rows = [_row(row, row.name, "") for row in view.measured(decision)]
    stages = list(view.measured_stages(decision))
    busy = [*(stage.compute_s for stage in decision.stages), *(busy_s for _, busy_s in stages)]
    times = per_sample_in(max(busy, default=0.0))
    for one, busy_s in stages:
        name = join(f"stage {one.number} computing a sample ", tag("small", one.layers))
        figure = view.FigureRow("", one.stage.compute_s, busy_s, times)
        rows.append(_row(figure, name, palette.of(one.stage.type)))
    said = [note for note in (view.errors_text(decision), floor_note(decision)) if note]
    return join(
        table("Predicted and measured figures", _COLUMNS, rows),
        *(tag("p", note, class_="aside") for note in said),
    )


def _row(row: view.FigureRow, name: str, colour: str) -> tuple[str, ...]:
    before, after = row.predicted, row.measured
    most = max(before, after) or 1.0
    drawn = bars(((before / most, "bar rest", ""), (after / most, "bar", colour)))
    return name, drawn, row.text(before), row.text(after), row.ratio or "-"
