"""Two decisions side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterps.report.terminal import heading, indented, table
from heterps.view.changes import Change, compare, is_whole

if TYPE_CHECKING:
    from scheduler import Decision

_MOST = 24  # rows of a table; a profile measured anew differs in every figure
_FACTOR_FROM = 10.0  # a ratio that is better said as a factor


def what_if_report(before: "Decision", after: "Decision") -> RenderableType:
    """What other inputs would make of a plan, beside the plan as it is."""
    return _report("before", before, "after", after)


def diff_report(
    first_name: str, first: "Decision", second_name: str, second: "Decision"
) -> RenderableType:
    """What is different between two decisions, each under its name."""
    return _report(first_name, first, second_name, second)


def _report(old_name: str, before: "Decision", new_name: str, after: "Decision") -> RenderableType:
    changes = compare(before, after)
    parts: list[RenderableType] = []
    names = (old_name, new_name)
    if changes.inputs:
        parts += [heading("Inputs that differ"), *_listed(changes.inputs, names)]
    elif changes.compared_inputs:
        parts += [heading("Inputs that differ"), Text("  none")]
    if not changes.compared_inputs:
        lacks = [n for n, d in zip(names, (before, after), strict=True) if not is_whole(d)]
        said = f"{' and '.join(lacks)}: kept without workload and resources; demands alone compared"
        parts.append(indented(Text(said, style="yellow")))
    parts.append(heading("Plan"))
    if changes.plan:
        parts += _listed(changes.plan, names)
    else:
        parts.append(Text("  the same"))
    parts += [heading("Figures"), indented(_table(changes.figures, names))]
    for name, decision in zip(names, (before, after), strict=True):
        if not decision.feasible and decision.plan.reason:
            parts.append(indented(Text(f"{name}: {decision.plan.reason}", "red", overflow="fold")))
    return Group(*parts)


def _listed(changes: Sequence[Change], names: tuple[str, str]) -> list[RenderableType]:
    parts: list[RenderableType] = [indented(_table(changes[:_MOST], names))]
    if len(changes) > _MOST:
        parts.append(Text(f"  and {len(changes) - _MOST} more; --json lists all", style="dim"))
    return parts


def _table(changes: Sequence[Change], names: tuple[str, str]) -> Table:
    made = table("", *(f">{name}" for name in names), ">change")
    for change in changes:
        made.add_row(*change.row(_FACTOR_FROM), style="" if change.is_real else "dim")
    return made
