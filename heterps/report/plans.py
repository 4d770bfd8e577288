"""The plans that a job has trained under, beside each other."""

from collections.abc import Sequence

from rich.console import Group, RenderableType

from heterps.client.records import PlanUse
from heterps.report.terminal import heading, indented, table
from heterps.view.plan import use_cells


def plans_report(plans: Sequence[PlanUse]) -> RenderableType:
    """Their table, under its heading."""
    made = table("plan", "why", ">from step", ">$/h", ">predicted", ">samples/s")
    for one in plans:
        made.add_row(*use_cells(one))
    return Group(heading("Plans"), indented(made))
