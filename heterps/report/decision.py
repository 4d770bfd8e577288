"""A decision: the plan, why it was chosen, what else there was, and what the agent thought."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterps.report.terminal import bullet, heading, indented, pairs, table
from heterps.view.changes import name_of, value_of
from heterps.view.figures import count, duration, money, per_sample, percent, rate, size
from heterps.view.plan import (
    ESTIMATED,
    chosen_point,
    gap_text,
    layers_text,
    marked_type,
    notes,
    rests_on_estimates,
    types_text,
    units_text,
)

if TYPE_CHECKING:
    from scheduler import Decision

_BAR = 8
_MOST_TYPES = 4  # whose shares fit side by side
_CHOSEN = "→"


def decision_report(decision: "Decision") -> RenderableType:
    """All of a decision, most important first."""
    parts: list[RenderableType] = [heading("Plan"), _summary(decision)]
    if decision.stages:
        parts += [Text(), indented(plan_table(decision))]
        legend = "CT, DT: computing, communicating for a sample; slack: waiting for the slowest"
        parts.append(Text(f"  {legend}", style="dim"))
    reasons = [
        text for text in decision.reasons if text.rstrip(".") != decision.plan.reason.rstrip(".")
    ]
    if reasons:
        parts += [heading("Why"), *(bullet(reason) for reason in reasons)]
    if decision.relaxations:
        title = "What would make a plan possible"
        parts += [heading(title), indented(relaxations_table(decision))]
    if decision.alternatives:
        parts += [heading("Alternatives"), indented(alternatives_table(decision))]
        tried = any(other.evaluations for other in decision.alternatives)
        legend = f"gap: above the lower bound{'; tried: plans priced' if tried else ''}"
        parts.append(Text(f"  {legend}", style="dim"))
    if decision.pareto:
        title = "Cost against throughput (no plan is both cheaper and faster than these)"
        parts += [heading(title), indented(pareto_table(decision))]
    if decision.probabilities:
        title = "How sure the agent was (probability of each type, along the plan)"
        parts += [heading(title), indented(probabilities_table(decision))]
        if decision.values:
            legend = "value: the critic's estimate, before the layer, of the reward to come"
            parts.append(Text(f"  {legend}", style="dim"))
    said = notes(decision)
    if said:
        parts += [Text(), *(indented(Text(note, style="yellow")) for note in said)]
    return Group(*parts)


def plan_table(decision: "Decision") -> Table:
    """One row a stage."""
    made = table("", "layers", "type", ">units", ">CT", ">DT", ">memory", ">slack")
    for number, (stage, slack) in enumerate(zip(decision.stages, decision.slack, strict=True)):
        made.add_row(
            str(number),
            layers_text(decision, stage.first, stage.last),
            marked_type(decision, stage.type, range(stage.first, stage.last + 1)),
            f"{stage.units:,}",
            per_sample(stage.compute_s),
            per_sample(stage.transfer_s),
            size(stage.memory_bytes),
            Text("slowest", style="bold yellow") if stage.bottleneck else percent(slack),
        )
    if decision.plan.ps_units:
        kind = decision.workload.ps_type if decision.workload is not None else ""
        made.add_row("", "parameter server", kind, f"{decision.plan.ps_units:,}", "", "", "", "")
    return made


def alternatives_table(decision: "Decision") -> Table:
    """The chosen plan and what the other methods came to, cheapest first.

    A gap is how far a cost lies above the lower bound; tried are the plans that were priced.
    """
    counted = any(other.evaluations for other in decision.alternatives)
    columns = ["!method", "plan", ">samples/s", ">cost", ">gap", ">took"]
    made = table(*columns, *([">tried"] if counted else []))
    chosen = f"{_CHOSEN} {decision.method}" if decision.feasible else f"  {decision.method}"
    figures = [rate(decision.throughput), money(decision.cost), percent(decision.gap)]
    failed = ["", "", "no plan"]
    made.add_row(
        Text(chosen, style="bold"),
        units_text(decision.stages),
        *(figures if decision.feasible else failed),
    )
    for other in decision.alternatives:
        tried = [count(other.evaluations)] if counted and other.evaluations else []
        plan = other.plan
        gap = plan.cost / decision.lower_bound - 1 if decision.lower_bound else float("inf")
        figures = [rate(plan.throughput), money(plan.cost), percent(gap)]
        made.add_row(
            f"  {other.method}",
            units_text(plan.stages),
            *(figures if plan.feasible else failed),
            duration(other.seconds),
            *tried,
            style="" if plan.feasible else "dim",
        )
    return made


def pareto_table(decision: "Decision") -> Table:
    """One row a point, slowest first; the chosen one stands out."""
    made = table("", ">samples/s", ">$/h", ">cost", "types in order", "")
    chosen = chosen_point(decision)
    for point in sorted(decision.pareto, key=lambda point: point.throughput):
        made.add_row(
            _CHOSEN if point is chosen else "",
            rate(point.throughput),
            money(point.price_per_hour),
            money(point.cost),
            types_text(point.assignment),
            "" if point.proven else "not proven",
            style="bold" if point is chosen else "",
        )
    return made


def relaxations_table(decision: "Decision") -> Table:
    """One row a change, and the plan that it makes possible; the cheapest first."""
    made = table("change", ">from", ">to", ">samples/s", ">$/h", ">cost")
    for change in decision.relaxations:
        made.add_row(
            name_of(change.key),
            value_of(change.key, change.current),
            value_of(change.key, change.needed),
            rate(change.throughput),
            money(change.price_per_hour),
            money(change.cost),
        )
    return made


def probabilities_table(decision: "Decision") -> Table:
    """A bar for each layer and type; the chosen type stands out.

    Of many types, the likeliest are named.
    """
    types = list(dict.fromkeys(name for row in decision.probabilities.values() for name in row))
    few = len(types) <= _MOST_TYPES
    value = [">value"] if decision.values else []
    made = table("layer", *(types if few else ["chosen", "likeliest"]), *value)
    for (layer, shares), chosen in zip(
        decision.probabilities.items(), decision.assignment, strict=False
    ):
        if few:
            cells = [_share(shares.get(name, 0.0), name == chosen) for name in types]
        else:
            order = sorted(shares, key=lambda name: -shares[name])[:_MOST_TYPES]
            named = ", ".join(f"{name} {shares[name]:.0%}" for name in order if shares[name])
            cells = [Text(chosen, style="bold green"), Text(named)]
        if value:
            cells.append(Text(f"{decision.values.get(layer, 0.0):.3f}"))
        made.add_row(layer, *cells)
    return made


def _share(share: float, chosen: bool) -> Text:
    bar = "█" * round(share * _BAR) or ("·" if share else "")
    return Text(f"{share:4.0%} {bar:<{_BAR}}", style="bold green" if chosen else "dim")


def _summary(decision: "Decision") -> RenderableType:
    if not decision.feasible:
        found = f"{decision.method}: {decision.plan.reason}"
        return indented(Text(found, style="red", overflow="fold"))
    guess = f" ({ESTIMATED})" if rests_on_estimates(decision) else ""
    floor, cap = decision.min_throughput, decision.max_price_per_hour
    lines = [
        ("by", f"{decision.method}, decided in {duration(decision.seconds)}"),
        (
            "throughput",
            f"{rate(decision.throughput)} samples/s"
            f"{f' (floor {rate(floor)})' if floor else ''}{guess}",
        ),
        (
            "price",
            f"{money(decision.plan.price_per_hour)} an hour{f' (cap {money(cap)})' if cap else ''}",
        ),
        ("cost", f"{money(decision.cost)} for the training{guess}; {gap_text(decision)}"),
    ]
    if decision.pin:
        lines.append(("pinned", ", ".join(f"{name}={t}" for name, t in decision.pin.items())))
    if decision.excluded:
        lines.append(("excluded", ", ".join(decision.excluded)))
    return pairs(lines)
