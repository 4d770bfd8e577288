"""What the other methods came to, as bars of cost beside the lower bound."""

import math
from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.parts import bars, table
from heterps.view import decision as view

if TYPE_CHECKING:
    from scheduler import Decision

_FAR = 5.0  # times this plan's cost: a longer bar says no more
_COLUMNS = ("method", "*cost beside the bound", ">cost", ">gap", ">samples/s", ">took")


def alternatives(decision: "Decision") -> Markup:
    """A row a method, the chosen one first; the line across the bars is the lower bound."""
    found = view.methods(decision)
    costs = [row.plan.cost for row in found if row.plan.feasible]
    cheapest = min(costs, default=1.0) or 1.0
    longest = min(max(costs, default=1.0), _FAR * cheapest) or 1.0
    bound = decision.lower_bound / longest if math.isfinite(decision.lower_bound) else None
    tried = any(row.tried for row in found)
    rows = []
    for row in found:
        chosen = row is found[0]
        name = join(row.method, tag("small", "chosen") if chosen and row.plan.feasible else None)
        took = "" if chosen and row.plan.feasible else row.took
        tail = (took, *([row.tried] if tried else []))
        if row.plan.feasible:
            drawn = bars(((row.plan.cost / longest, "bar" if chosen else "bar rest", ""),), bound)
            price = join(row.cost, " …" if row.plan.cost > longest and not chosen else None)
            rows.append((name, drawn, price, row.gap, row.rate, *tail, row.units))
        else:
            reason = "infeasible" if chosen else row.plan.reason or "infeasible"
            rows.append((name, tag("span", reason, class_="why"), "none", "", "", *tail, ""))
    columns = (*_COLUMNS, *([">plans tried"] if tried else []), "plan")
    return table(
        "Methods and their plans", columns, rows, lambda row: "picked" if row == 0 else None
    )
