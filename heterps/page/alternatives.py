"""What the other methods came to, as bars of cost beside the lower bound."""

import math
from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.parts import Column, bars, table
from heterps.view.figures import count, duration, money, percent, rate
from heterps.view.plan import units_text

if TYPE_CHECKING:
    from scheduler import Decision

_FAR = 5.0  # times this plan's cost: a longer bar says no more


def alternatives(decision: "Decision") -> Markup:
    """A row a method, the chosen one first; the line across the bars is the lower bound."""
    costs = [other.plan.cost for other in decision.alternatives if other.plan.feasible]
    costs += [decision.cost] if decision.feasible else []
    cheapest = min(costs, default=1.0) or 1.0
    longest = min(max(costs, default=1.0), _FAR * cheapest) or 1.0
    bound = decision.lower_bound / longest if math.isfinite(decision.lower_bound) else None
    counted = any(other.evaluations for other in decision.alternatives)
    columns = [
        Column("method"),
        Column("cost beside the bound", wide=True),
        Column("cost", number=True),
        Column("gap", number=True),
        Column("samples/s", number=True),
        Column("took", number=True),
        *([Column("plans tried", number=True)] if counted else []),
        Column("plan"),
    ]
    rows = [_chosen(decision, longest, bound)]
    for other in decision.alternatives:
        tail = (duration(other.seconds), count(other.evaluations) if other.evaluations else "")
        plan = other.plan
        row: tuple[str | None, ...]
        if plan.feasible:
            drawn = bars(((plan.cost / longest, "bar rest", ""),), bound)
            row = (
                other.method,
                drawn,
                join(money(plan.cost), " …" if plan.cost > longest else None),
                _gap(plan.cost, decision.lower_bound),
                rate(plan.throughput),
                *tail,
                units_text(plan.stages),
            )
        else:
            why = tag("span", plan.reason or "infeasible", class_="why")
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
