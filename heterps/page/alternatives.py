"""What the other methods came to, as bars of cost beside the lower bound."""

import math
from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.parts import bars, table
from heterps.view.figures import count, duration, money, percent, rate
from heterps.view.plan import units_text

if TYPE_CHECKING:
    from scheduler import Decision

_FAR = 5.0  # times this plan's cost: a longer bar says no more


def alternatives(decision: "Decision") -> Markup:
    """A row a method, the chosen one first; the line across the bars is the lower bound."""
    costs = [other.cost for other in decision.alternatives if other.feasible]
    costs += [decision.cost] if decision.feasible else []
    cheapest = min(costs, default=1.0) or 1.0
    longest = min(max(costs, default=1.0), _FAR * cheapest) or 1.0
    bound = decision.lower_bound / longest if math.isfinite(decision.lower_bound) else None
    counted = any(other.evaluations for other in decision.alternatives)
    columns = [
        "method",
        "*cost beside the bound",
        ">cost",
        ">gap",
        ">samples/s",
        ">took",
        *([">plans tried"] if counted else []),
        "plan",
    ]
    rows = [_chosen(decision, longest, bound)]
    for other in decision.alternatives:
        tail = (duration(other.seconds), count(other.evaluations) if other.evaluations else "")
        row: tuple[str | None, ...]
        if other.feasible:
            drawn = bars(((other.cost / longest, "bar rest", ""),), bound)
            row = (
                other.method,
                drawn,
                join(money(other.cost), " …" if other.cost > longest else None),
                _gap(other.cost, decision.lower_bound),
                rate(other.throughput),
                *tail,
                units_text(other.stages),
            )
        else:
            why = tag("span", other.reason or "infeasible", class_="why")
            row = (other.method, why, "none", "", "", *tail, "")
        rows.append(row if counted else (*row[:6], row[7]))
    rows[0] = rows[0] if counted else (*rows[0][:6], rows[0][7])
    return table(
        "Methods and their plans", columns, rows, lambda row: "picked" if row == 0 else None
    )


def _chosen(decision: "Decision", longest: float, bound: float | None) -> tuple[str | None, ...]:
    name = join(decision.method, tag("small", "chosen") if decision.feasible else None)
    if not decision.feasible:
        why = tag("span", "infeasible", class_="why")
        return (name, why, "none", "", "", duration(decision.seconds), "", "")
    return (
        name,
        bars(((decision.cost / longest, "bar", ""),), bound),
        money(decision.cost),
        percent(decision.gap),
        rate(decision.throughput),
        "",
        "",
        units_text(decision.stages),
    )


def _gap(cost: float, bound: float) -> str:
    return percent(cost / bound - 1) if bound and math.isfinite(bound) else "-"
