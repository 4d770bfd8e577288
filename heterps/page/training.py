"""How the agent learned: its best cost and its mean reward by environment steps."""

import math
from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.parts import details, table
from heterps.html.plot import Plot
from heterps.html.scale import Axis
from heterps.view.figures import count, money

if TYPE_CHECKING:
    from scheduler import Decision

_COLUMNS = (">steps", ">mean reward", ">best cost")
_MOST = 100  # rows of the table
_HEIGHT_PX = 170.0


def training(decision: "Decision") -> Markup:
    """Two charts side by side, on a phone one below the other, and a table."""
    curve = sorted(decision.training, key=lambda point: point.steps)
    x = Axis.around([float(point.steps) for point in curve], zero=True, most=4)
    reward = Plot(
        "Mean reward by steps",
        f"From {curve[0].mean_reward:.4g} to {curve[-1].mean_reward:.4g}.",
        x,
        Axis.around([point.mean_reward for point in curve], most=4),
        "environment steps",
        "mean reward",
        count,
        lambda value: f"{value:.3g}",
        _HEIGHT_PX,
    )
    reward.line([(p.steps, p.mean_reward) for p in curve if math.isfinite(p.mean_reward)], "curve")
    able = [(float(point.steps), point.best_cost) for point in curve]
    able = [(steps, cost) for steps, cost in able if math.isfinite(cost)]
    charts = [reward.draw()]
    if able:
        bound = decision.lower_bound if math.isfinite(decision.lower_bound) else able[-1][1]
        best = Plot(
            "Cost of the best plan by steps",
            f"From {money(able[0][1])} to {money(able[-1][1])}; lower bound {money(bound)}.",
            x,
            Axis.around([*(cost for _, cost in able), bound], most=4),
            "environment steps",
            "best cost so far",
            count,
            money,
            _HEIGHT_PX,
        )
        best.level(bound, "limit", "lower bound")
        best.line(able, "curve")
        charts.insert(0, best.draw())
    rows = [
        (f"{point.steps:,}", f"{point.mean_reward:.4g}", money(point.best_cost))
        for point in curve[:: max(1, math.ceil(len(curve) / _MOST))]
    ]
    numbers = table("The agent's training", _COLUMNS, rows, stacked=False)
    return join(tag("div", *charts, class_="pair"), details("The curve as a table", numbers))
