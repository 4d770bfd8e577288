"""A decision: the plan, why it was chosen, what else there was, and what the agent thought."""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterps.report.terminal import bullet, heading, indented, pairs, table
from heterps.view import decision as view
from heterps.view import steps
from heterps.view.figures import duration, money, per_sample, rate, size
from heterps.view.plan import (
    ESTIMATED,
    gap_text,
    marked_type,
    notes,
    rests_on_estimates,
    units_of,
)
from heterps.view.table import Column

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
        parts += [indented(Text(note)) for note in steps.notes(decision)]
    if reasons := view.reasons(decision):
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
    for row in view.stages(decision):
        stage = row.stage
        made.add_row(
            str(row.number),
            row.layers,
            marked_type(decision, stage.type, range(stage.first, stage.last + 1)),
            units_of(stage),
            per_sample(stage.compute_s),
            per_sample(stage.transfer_s),
            size(stage.memory_bytes),
            Text(row.slack, style="bold yellow") if stage.bottleneck else row.slack,
        )
    if decision.plan.ps_units:
        kind = decision.workload.ps_type if decision.workload is not None else ""
        made.add_row("", "parameter server", kind, f"{decision.plan.ps_units:,}", "", "", "", "")
    return made


def alternatives_table(decision: "Decision") -> Table:
    """The chosen plan and what the other methods came to, cheapest first.

    A gap is how far a cost lies above the lower bound; tried are the plans that were priced.
    """
    first, *others = view.methods(decision)
    tried = [">tried"] if any(row.tried for row in others) else []
    made = table("!method", "plan", ">samples/s", ">cost", ">gap", ">took", *tried)
    mark = _CHOSEN if first.plan.feasible else " "
    made.add_row(Text(f"{mark} {first.method}", style="bold"), *_figures(first))
    for row in others:
        made.add_row(
            f"  {row.method}",
            *_figures(row),
            row.took,
            *([row.tried] if row.tried else []),
            style="" if row.plan.feasible else "dim",
        )
    return made


def pareto_table(decision: "Decision") -> Table:
    """One row a point, slowest first; the chosen one stands out."""
    made = table("", ">samples/s", ">$/h", ">cost", "types in order", "")
    for row in view.points(decision):
        made.add_row(
            _CHOSEN if row.chosen else "",
            row.rate,
            row.price,
            row.cost,
            row.types,
            "" if row.point.proven else "not proven",
            style="bold" if row.chosen else "",
        )
    return made


def relaxations_table(decision: "Decision") -> Table:
    """One row a change, and the plan that it makes possible; the cheapest first."""
    made = table("change", ">from", ">to", ">samples/s", ">$/h", ">cost")
    for row in view.relaxations(decision):
        made.add_row(*row)
    return made


def probabilities_table(decision: "Decision") -> Table:
    """A bar for each layer and type; the chosen type stands out.

    Of many types, the likeliest are named.
    """
    types, rows = view.probabilities(decision)
    few = len(types) <= _MOST_TYPES
    value = [">value"] if decision.values else []
    names = [Column(name) for name in types] if few else ["chosen", "likeliest"]
    made = table("layer", *names, *value)
    for row in rows:
        if few:
            cells = [_share(row.shares.get(name, 0.0), name == row.chosen) for name in types]
        else:
            order = sorted(row.shares, key=lambda name: -row.shares[name])[:_MOST_TYPES]
            named = ", ".join(f"{n} {row.shares[n]:.0%}" for n in order if row.shares[n])
            cells = [Text(row.chosen, style="bold green"), Text(named)]
        made.add_row(row.layer, *cells, *([row.value] if value else []))
    return made


def _figures(row: view.MethodRow) -> tuple[str, ...]:
    return (
        row.units,
        *((row.rate, row.cost, row.gap) if row.plan.feasible else ("", "", "no plan")),
    )


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
