"""The resource types that were offered, with prices and limits, as a table."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from heterps.html.markup import Markup
from heterps.html.palette import Palette
from heterps.html.parts import table
from heterps.view.figures import duration, money, size
from heterps.view.table import Column

if TYPE_CHECKING:
    from scheduler.problem.workload import Resources, ResourceType

_COLUMNS = ("type", ">price an hour", ">units, at most", ">memory a unit")


def offered(
    title: str,
    resources: "Resources",
    palette: Palette,
    more: "Sequence[tuple[str, Callable[[ResourceType], str]]]" = (),
    stacked: bool = True,
) -> Markup:
    """A row a type.

    Args:
        more: names of further columns, and their text of each type.
        stacked: as of `table`.
    """
    columns: tuple[str | Column, ...] = (
        *_COLUMNS,
        *(Column(name, number=True) for name, _ in more),
        "",
    )
    rows = [
        (
            palette.chip(kind.name),
            money(kind.price_per_hour),
            f"{kind.limit:,}",
            size(kind.memory_bytes),
            *(text(kind) for _, text in more),
            _marks(kind),
        )
        for kind in resources.types
    ]
    return table(title, columns, rows, stacked=stacked)


def _marks(kind: "ResourceType") -> str:
    marks = [f"{kind.threads} threads a unit"] if kind.threads > 1 else []
    marks += ["emulated here"] if kind.emulated else []
    if kind.interruptions_per_hour:
        marks.append(
            f"spot: {kind.interruptions_per_hour:g} interruptions an hour, "
            f"{duration(kind.recovery_s)} each"
        )
    return "; ".join(marks)
