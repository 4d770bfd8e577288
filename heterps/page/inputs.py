"""What the decision was made from: demands, offer, profile and versions, folded away."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.palette import Palette
from heterps.html.parts import details, pairs, table
from heterps.page.offered import offered
from heterps.view.changes import name_of, value_of
from heterps.view.figures import duration, size

if TYPE_CHECKING:
    from scheduler import Decision
    from scheduler.problem.workload import LayerCost, Workload

_MOST = 2000  # rows of the profile; of more, the exported decision has all
_PROFILE = (
    *("layer", "kind", "type", ">compute", ">fixed", ">parallel", ">sync"),
    *(">transfer", ">parallel", ">delay", ">memory", "figures"),
)


def inputs(decision: "Decision", palette: Palette) -> Markup:
    """Each input under a line that opens it."""
    workload, resources = decision.workload, decision.resources
    return join(
        details("Demands", _demands(decision)),
        details(
            f"Offer: {len(resources.types)} resource types",
            offered("Resource types on offer", resources, palette, stacked=False),
        )
        if resources
        else None,
        details(f"Profile: {len(workload.layers)} layers of {workload.name}", _profile(workload))
        if workload
        else None,
        details("How this decision came about", _origin(decision)),
    )


def _demands(decision: "Decision") -> Markup:
    demands = [
        (name_of(key), value_of(key, getattr(decision, key)))
        for key in ("min_throughput", "max_price_per_hour")
    ]
    pins = ", ".join(f"{layer} on {kind}" for layer, kind in decision.pin.items())
    demands += [("pinned", pins or "none")]
    demands += [("excluded", ", ".join(decision.excluded) or "none")]
    return pairs(demands)


def _profile(workload: "Workload") -> Markup:
    rows = [
        (
            layer.name,
            layer.kind,
            kind,
            *_figures(cost),
            "estimated" if cost.estimated else "measured or given",
        )
        for layer in workload.layers
        for kind, cost in layer.cost.items()
    ]
    more = len(rows) - _MOST
    return join(
        tag(
            "p",
            f"Milliseconds on one unit for a batch of {workload.reference_batch:,} samples; "
            f"{workload.samples:,.0f} samples in all. Parallel: the share that divides by the "
            "number of units.",
            class_="caption",
        ),
        table("Profile", _PROFILE, rows[:_MOST], stacked=False),
        tag("p", f"and {more:,} rows more in the exported decision") if more > 0 else None,
    )


def _figures(cost: "LayerCost") -> tuple[str, ...]:
    def milliseconds(seconds: float) -> str:
        return f"{1000 * seconds:.4g}" if seconds else "0"

    return (
        milliseconds(cost.compute_s),
        milliseconds(cost.fixed_s),
        f"{cost.parallel_compute:.0%}",
        milliseconds(cost.sync_s),
        milliseconds(cost.transfer_s),
        f"{cost.parallel_sync:.0%}",
        milliseconds(cost.delay_s),
        size(cost.memory_bytes),
    )


def _origin(decision: "Decision") -> Markup:
    facts = [("method", decision.method), ("seed", str(decision.seed))]
    facts.append(("decided in", duration(decision.seconds)))
    if decision.created_at:
        when = datetime.fromtimestamp(decision.created_at, UTC)
        facts.append(("decided at", when.strftime("%Y-%m-%d %H:%M:%S UTC")))
    if decision.input_hash:
        facts.append(("SHA-256 of the inputs", decision.input_hash))
    facts += [(name, version) for name, version in sorted(decision.versions.items())]
    return pairs(facts)
