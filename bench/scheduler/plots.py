"""Pictures of the scheduler's benchmark."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.pages import picture
from bench.scheduler.statistics import Row, grouped

COLOURS: Final = {
    "ppo": "#d1495b",
    "exact": "#1f2933",
    "greedy": "#8d99ae",
    "genetic": "#2a9d8f",
    "annealing": "#76b041",
    "bayesian": "#e9a23b",
    "rl-lstm": "#3d6fb4",
    "rl-rnn": "#8ab0de",
    "random": "#b8a9c9",
    "aibox": "#b08968",
    "byteps": "#d4b483",
    "all-cpu": "#c3c9d1",
    "all-gpu": "#dde1e6",
}
_DEMANDS: Final = {
    "none": "no floor",
    "moderate": "floor of 0.1 to 0.8 of the highest",
    "near": "floor of 0.9 to 0.995 of the highest",
    "shared": "shared limits that bind",
}
_LEAST = 1e-3  # %, what a gap of none is drawn as


def gap_picture(rows: Sequence[Row], path: Path) -> None:
    """Share of the unseen problems whose gap is at most so much, by demand."""

    def draw(axes: Sequence[Any]) -> None:
        for demand, some in grouped(rows, "demand").items():
            gaps = np.sort([100 * row["gap"] for row in some if row["gap"] is not None])
            shares = np.arange(1, len(gaps) + 1) / max(1, len(some))
            axes[0].step(
                np.maximum(gaps, _LEAST), shares, where="post", label=_DEMANDS.get(demand, demand)
            )
        axes[0].axvline(1, color="#999999", linewidth=0.8, linestyle=":")
        axes[0].axvline(5, color="#999999", linewidth=0.8, linestyle=":")
        axes[0].set(xscale="log", xlabel="gap to the bound, % (0 drawn at 0.001)", ylim=(0, 1.01))
        axes[0].set_ylabel("share of problems")
        axes[0].legend(loc="upper left")

    picture(draw, path, 1, (5.6, 3.2), legend_outside=True)


def rivals_picture(rows: Sequence[Row], path: Path) -> None:
    """Mean gap of every method at both budgets, where it has a plan, and where that is."""
    panels = [("evaluations", "as many evaluations"), ("time", "100 times the time")]
    panels = [panel for panel in panels if any(row["budget"] == panel[0] for row in rows)]

    def draw(axes: Sequence[Any]) -> None:
        for axis, (budget, title) in zip(axes, panels, strict=True):
            some = [row for row in rows if row["budget"] == budget]
            ours = list({row["name"]: row["ppo_gap"] for row in some}.values())
            gaps = {"ppo": ours} | {
                method: [row["gap"] for row in of] for method, of in grouped(some, "method").items()
            }
            order = sorted(gaps, key=lambda name: _mean(gaps[name]), reverse=True)
            # A method is not better for having no plan: say for how many it has one.
            labels = [f"{name} {_count(gaps[name])} of {len(gaps[name])}" for name in order]
            widths = [max(100 * _mean(gaps[name]), _LEAST) for name in order]
            axis.barh(labels, widths, color=[COLOURS.get(name, "#999999") for name in order])
            axis.set(xscale="log", xlabel="mean gap to the bound, %", title=title)
            axis.set_xlim(left=_LEAST / 2)

    picture(draw, path, len(panels), (4.2 * len(panels), 3.4), legend_outside=True)


def paper_picture(rows: Sequence[Row], path: Path) -> None:
    """Cost relative to the cheapest, and highest throughput relative to the fastest, by method."""
    demands = [demand for demand in grouped(rows, "demand") if demand != "highest"]
    middle = demands[len(demands) // 2] if demands else ""

    def draw(axes: Sequence[Any]) -> None:
        costs = [row for row in rows if row["demand"] == middle and row["cost"] is not None]
        least = {
            name: min(r["cost"] for r in some) for name, some in grouped(costs, "name").items()
        }
        _bars(axes[0], costs, lambda row: row["cost"] / least[row["name"]])
        axes[0].set(yscale="log", ylabel="cost / least cost", title=f"floor: {middle}")
        fast = [row for row in rows if row["demand"] == "highest"]
        most = {name: max(r["throughput"] for r in s) for name, s in grouped(fast, "name").items()}
        _bars(axes[1], fast, lambda row: row["throughput"] / most[row["name"]])
        axes[1].set(ylabel="throughput / highest", title="asked for the highest throughput")
        axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    picture(draw, path, 2, (10.5, 3.2), legend_outside=True)


def scaling_picture(rows: Sequence[Row], path: Path) -> None:
    """Seconds of a plan against layers and against types."""

    def draw(axes: Sequence[Any]) -> None:
        fixed = {"layers": "4 types", "types": "16 layers"}
        for axis, over in zip(axes, fixed, strict=True):
            some = [row for row in rows if row["axis"] == over]
            for method, of in grouped(some, "method").items():
                sizes = sorted({row[over] for row in of})
                at = [[row["seconds"] for row in of if row[over] == size] for size in sizes]
                medians = [float(np.median(some)) for some in at]
                colour = COLOURS.get(method, "#999999")
                wide = 2.2 if method == "ppo" else 1.1
                axis.plot(sizes, medians, "o-", ms=3, lw=wide, color=colour, label=method)
            axis.set(xscale="log", yscale="log", xlabel=f"{over} ({fixed[over]})", ylabel="seconds")
            ticks = sorted({row[over] for row in some})
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.minorticks_off()
        axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5))

    picture(draw, path, 2, (9.5, 3.4), legend_outside=True)


def _bars(axis: Any, rows: Sequence[Row], value: Callable[[Row], float]) -> None:
    models, methods = list(grouped(rows, "name")), list(grouped(rows, "method"))
    width = 0.85 / max(1, len(methods))
    for number, method in enumerate(methods):
        found = {row["name"]: value(row) for row in rows if row["method"] == method}
        at = [n + (number - len(methods) / 2 + 0.5) * width for n in range(len(models))]
        heights = [found.get(model, 0.0) for model in models]
        axis.bar(at, heights, width, color=COLOURS.get(method, "#999999"), label=method)
    axis.set_xticks(range(len(models)), models)


def _count(values: Sequence[float | None]) -> int:
    return sum(1 for value in values if value is not None)


def _mean(values: Sequence[float | None]) -> float:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else 0.0
