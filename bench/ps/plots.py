"""Pictures of the parameter-server benchmark."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.pages import picture
from bench.ps.roster import CEILING, OURS

_OURS_COLOUR, _CEILING_COLOUR, _OTHER_COLOUR = "#d1495b", "#8d99ae", "#3d6fb4"


def rates_picture(found: dict[str, Any], path: Path) -> None:
    """Rows a second by peer, one panel for each operation, at the first dim and shards."""
    lines = found["measurements"]
    place = min((line["dim"], line["shards"]) for line in lines)
    mine = [x for x in lines if (x["dim"], x["shards"], x["workload"]) == (*place, "zipf")]

    def draw(axes: Sequence[Any]) -> None:
        for axis, op in zip(axes, ("pull", "push", "both"), strict=True):
            some = sorted((x for x in mine if x["op"] == op), key=lambda x: x["rows_per_s"])
            names = [line["peer"] for line in some]
            rates = [line["rows_per_s"] / 1e6 for line in some]
            axis.barh(names, rates, color=[_colour(name) for name in names])
            axis.set(title=op if op != "both" else "pull, then push", xlabel="M rows/s")
        axes[0].set_ylabel(f"dim {place[0]}, {place[1]} shard")

    picture(draw, path, 3, (9.0, 3.4))


def growth_picture(found: dict[str, Any], path: Path) -> None:
    """Cost and memory of a row against the rows of the table."""

    def draw(axes: Sequence[Any]) -> None:
        for grown in found["growth"]:
            points = grown["points"]
            rows = [point["rows"] for point in points]
            style = {"linestyle": "-" if grown["dim"] == 16 else "--", "marker": "o"}
            colour = _colour(grown["peer"])
            label = f"{grown['peer']}, dim {grown['dim']}"
            for axis, op in zip(axes[:2], ("pull", "push"), strict=True):
                cost = [1e9 * point[f"{op}_s_a_row"] for point in points]
                axis.plot(rows, cost, color=colour, label=label, markersize=3, **style)
                axis.set(xscale="log", yscale="log", xlabel="rows", ylabel=f"{op}, ns a row")
            size = np.array([point["bytes_a_row"] for point in points])
            axes[2].plot(rows, size, color=colour, label=label, markersize=3, **style)
        axes[2].set(xscale="log", yscale="log", xlabel="rows", ylabel="server bytes a row")
        axes[0].legend(loc="best", fontsize=7)

    picture(draw, path, 3, (9.0, 2.8))


def _colour(peer: str) -> str:
    return {OURS: _OURS_COLOUR, CEILING: _CEILING_COLOUR}.get(peer, _OTHER_COLOUR)
