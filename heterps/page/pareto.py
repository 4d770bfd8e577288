"""Cost against throughput: the plans that no other beats in both, and the chosen one."""

from itertools import pairwise
from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join
from heterps.html.parts import details, table
from heterps.html.plot import Plot
from heterps.html.scale import Axis
from heterps.view import decision as view
from heterps.view.figures import count, money, rate

if TYPE_CHECKING:
    from scheduler import Decision

_COLUMNS = ("", ">samples/s", ">price an hour", ">cost", "types in order", "proven")
_FAR = 1.15  # times the dearest point: other methods' plans beyond are not drawn


def pareto(decision: "Decision") -> Markup:
    """The chart, and its points as a table."""
    rows = view.points(decision)
    points = [row.point for row in rows]
    dearest = _FAR * max(point.cost for point in points)
    slowest = 0.5 * points[0].throughput
    others = [
        (other.method, other.plan)
        for other in decision.alternatives
        if other.plan.feasible and other.plan.cost <= dearest and other.plan.throughput >= slowest
    ]
    places = [(one.throughput, one.cost) for one in points]
    places += [(plan.throughput, plan.cost) for _, plan in others]
    places += [(decision.throughput, decision.cost)] if decision.feasible else []
    floor = decision.min_throughput
    rates = [throughput for throughput, _ in places] + ([floor] if floor >= slowest else [])
    plot = Plot(
        "Cost against throughput",
        f"{len(points)} plans from {rate(points[0].throughput)} samples/s for "
        f"{money(points[0].cost)} to {rate(points[-1].throughput)} samples/s for "
        f"{money(points[-1].cost)}.",
        Axis.around(rates),
        Axis.around([cost for _, cost in places]),
        "samples/s",
        "cost of the training",
        count,
        money,
    )
    if floor >= slowest:
        plot.upright(floor, "limit", f"floor {rate(floor)}")
    # Between two points the faster plan is the cheapest that is fast enough: a step.
    steps = [(points[0].throughput, points[0].cost)]
    for before, after in pairwise(points):
        steps += [(before.throughput, after.cost), (after.throughput, after.cost)]
    plot.line(steps, "curve")
    for point in points:
        tip = f"{rate(point.throughput)} samples/s, {money(point.cost)}"
        plot.point(point.throughput, point.cost, "dot" if point.proven else "dot open", 3.5, tip)
    if decision.feasible:
        tip = f"this plan: {rate(decision.throughput)} samples/s, {money(decision.cost)}"
        plot.point(decision.throughput, decision.cost, "chosen", 7, tip)
        plot.label(decision.throughput, decision.cost, "this plan", "note strong")
    for method, plan in others:
        same = decision.feasible and abs(plan.cost / decision.cost - 1) < 1e-6
        if not same:
            tip = f"{method}: {rate(plan.throughput)} samples/s, {money(plan.cost)}"
            plot.point(plan.throughput, plan.cost, "other", 4, tip)
            plot.label(plan.throughput, plan.cost, method)
    return join(plot.draw(), details("The points as a table", _table(rows)))


def _table(rows: list[view.PointRow]) -> Markup:
    cells = [
        (
            "this plan" if row.chosen else "",
            row.rate,
            row.price,
            row.cost,
            row.types,
            "yes" if row.point.proven else "no",
        )
        for row in rows
    ]
    return table(
        "Points of the curve",
        _COLUMNS,
        cells,
        lambda row: "picked" if rows[row].chosen else None,
        stacked=False,
    )
