"""A profile as a table: what each layer costs on each type, how it was found and how sure it is."""

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterps.report.terminal import table
from heterps.view.figures import size
from protos.decision_pb2 import LayerCost, Workload
from workers.profiling.catalogue import CatalogueType

_FACTOR_FROM = 0.3  # a spread of ±30 % and more is better said as a factor


def layer_table(workload: Workload, types: Sequence[str]) -> Table:
    """One row a layer and type, in this order of types; times are for one batch on one unit."""
    made = table(
        "layer", "type", ">compute", ">a", ">sync", ">b", ">transfer", ">memory", "!", left=0
    )
    for layer in workload.layers:
        name = layer.name
        for kind in [kind for kind in types if kind in layer.cost]:
            cost = layer.cost[kind]
            made.add_row(
                name,
                kind,
                _time(cost.compute_s),
                f"{cost.parallel_compute:.0%}",
                _time(cost.sync_s),
                f"{cost.parallel_sync:.0%}" if cost.sync_s else "",
                _time(cost.transfer_s),
                size(cost.memory_bytes),
                _origin(cost),
            )
            name = ""
    return made


def catalogue_table(types: Mapping[str, CatalogueType]) -> RenderableType:
    """One row a figure; its source by number, with address and date below."""
    sources = list(
        dict.fromkeys(figure.source for kind in types.values() for figure in kind.figures.values())
    )
    made = table("type", "figure", ">value", ">source", "", left=0)
    for kind in types.values():
        name = kind.name
        for key, figure in kind.figures.items():
            number = f"[{sources.index(figure.source) + 1}]"
            made.add_row(name, key, f"{figure.value:.4g}", number, figure.note)
            name = ""
    listed = [
        Text(f"[{number}] {source.title}, {source.date}: {source.url}", overflow="fold")
        for number, source in enumerate(sources, 1)
    ]
    return Group(made, Text(), *listed)


def sureness(uncertainty: float) -> str:
    """A standard deviation of the logarithm as a person says it; empty where it is not known."""
    if uncertainty <= 0:
        return ""
    if uncertainty < _FACTOR_FROM:
        return f"±{uncertainty:.0%}"
    return f"×÷{math.exp(uncertainty):.1f}"


def _origin(cost: LayerCost) -> Text:
    if cost.estimated:
        return Text(f"estimated {sureness(cost.uncertainty)}", style="yellow")
    return Text(f"measured {sureness(cost.uncertainty)}", style="green")


def _time(seconds: float) -> str:
    """Three digits; empty for no time."""
    if seconds <= 0:
        return ""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 0.9995 or unit == "µs":
            value = seconds * factor
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return ""
