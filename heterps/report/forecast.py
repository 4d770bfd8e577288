"""How a plan would run: what queues, times that vary, slow workers and interruptions cost."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterps.report.terminal import heading, indented, table
from heterps.view.figures import duration, percent, rate

if TYPE_CHECKING:
    from scheduler.simulation.forecast import Forecast

_SPENT = ("computing", "rows", "sums", "crossing", "others", "lost")


def forecast_report(forecast: "Forecast") -> RenderableType:
    """A row for each thing that a price leaves out, each with those above it."""
    parts: list[RenderableType] = [heading("Simulated"), indented(_steps_table(forecast)), Text()]
    parts.append(Text("  Where workers' time goes", style="dim"))
    parts.append(indented(_spent_table(forecast)))
    parts += [indented(Text(note)) for note in _notes(forecast)]
    return Group(*parts)


def _steps_table(forecast: "Forecast") -> Table:
    made = table("", ">samples/s", ">of promised", ">step", ">99 of 100 within")
    for row in forecast.scenarios:
        made.add_row(
            row.what,
            rate(row.throughput),
            percent(row.kept),
            duration(row.step_s),
            duration(row.late_s),
        )
    return made


def _spent_table(forecast: "Forecast") -> Table:
    shown = [k for k in _SPENT if any(row.spent[k] >= 5e-4 for row in forecast.scenarios)]
    shards = any(row.serving for row in forecast.scenarios)
    made = table("", *(f">{name}" for name in shown), *([">shards busy"] if shards else []))
    for row in forecast.scenarios:
        busy = [percent(row.serving)] if shards else []
        made.add_row(row.what, *(percent(row.spent[name]) for name in shown), *busy)
    return made


def _notes(forecast: "Forecast") -> list[str]:
    steps = (
        f"{forecast.steps:,} steps of {forecast.batch:,.0f} samples in {forecast.micro_batches:,} "
        f"micro-batches at staleness {forecast.staleness}"
    )
    said = [f"Simulated: {steps}."]
    if forecast.assumed:
        said = [f"The workload says nothing of steps; simulated are {steps}."]
    lost = forecast.interruptions
    if lost is not None:
        said.append(
            f"Units are taken away {lost.per_hour:.3g} times an hour, which costs "
            f"{duration(lost.lost_s)} each time: {percent(lost.share)} of the time."
        )
    return said
