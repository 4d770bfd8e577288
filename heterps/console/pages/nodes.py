"""The page of nodes and prices: what there is, who uses it, and what it costs."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from heterps.client.records import Node
from heterps.html.markup import Markup, join, tag
from heterps.html.palette import Palette
from heterps.html.parts import section, table, tiles
from heterps.page.offered import offered
from heterps.view.figures import money

if TYPE_CHECKING:
    from scheduler.problem.workload import Resources

_NODES = ("node", "type", "*units in use", ">used", ">of", "hardware", "runs")


def node_sections(nodes: Sequence[Node], offer: "Resources | None", job_name: str) -> list[Markup]:
    """Tiles, nodes and prices.

    Args:
        offer: of the latest job that was planned, whose name is `job_name`.
    """
    names = [*offer.names] if offer else []
    names += sorted({node.type for node in nodes if node.type} - set(names))
    palette = Palette(names)
    units, used = Counter[str](), Counter[str]()
    for node in nodes:
        if node.kind == "node":
            units[node.type] += node.units
            used[node.type] += node.units_used
    prices = {kind.name: kind.price_per_hour for kind in offer.types} if offer else {}
    spending = sum(prices.get(kind, 0.0) * number for kind, number in used.items())
    shown = [
        ("nodes", str(sum(node.kind == "node" for node in nodes)), ""),
        ("units in use", f"{used.total():,}", f"of {units.total():,}"),
    ]
    if prices:
        shown.append(("an hour, now", money(spending), "for the units in use"))
    if shards := sum(node.kind == "shard" for node in nodes):
        shown.append(("standing shards", str(shards), ""))
    caption = (
        "A node is a host's daemon; a standing shard is a parameter server that outlives jobs."
    )
    empty = tag("p", "No nodes are alive. Start one with ", tag("code", "heterps node"), ".")
    parts = [
        section("total", "Now", None, tiles(shown)),
        section("nodes", "Nodes", caption, _nodes(nodes, palette) if nodes else empty),
    ]
    if offer is not None:
        told = f"As job {job_name} offered them. Each job file names its own resources."
        parts.append(section("prices", "Prices", told, _prices(offer, units, used, palette)))
    return parts


def _nodes(nodes: Sequence[Node], palette: Palette) -> Markup:
    rows = []
    for node in nodes:
        running = [process for process in node.processes if process.running]
        runs = join(
            *(
                tag(
                    "div",
                    tag("a", process.job_id, href=f"/jobs/{process.job_id}"),
                    f" {process.label}",
                )
                for process in running
            )
        )
        name = join(node.node_id, tag("small", node.address, class_="id"))
        if node.kind != "node":
            rows.append((name, "shard", "", "", "", node.device, runs))
            continue
        kind = palette.chip(node.type, f"{node.type} (emulated)" if node.emulated else node.type)
        drawn = tag(
            "progress",
            value=node.units_used,
            max=max(node.units, 1),
            aria_label=f"units of {node.node_id} in use",
        )
        numbers = (f"{node.units_used:,}", f"{node.units:,}")
        if node.draining:
            runs = join(tag("div", f"drains: it ends in {node.ends_in_s:.0f} s at most"), runs)
        rows.append((name, kind, drawn, *numbers, node.device, runs))
    return table("Nodes", _NODES, rows)


def _prices(
    offer: "Resources", units: "Counter[str]", used: "Counter[str]", palette: Palette
) -> Markup:
    more = (
        ("alive here", lambda kind: f"{units[kind.name]:,}"),
        ("in use", lambda kind: f"{used[kind.name]:,}"),
        ("spent an hour", lambda kind: money(kind.price_per_hour * used[kind.name])),
    )
    return offered("Prices by type", offer, palette, more)
