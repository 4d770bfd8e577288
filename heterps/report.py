"""What a person reads: a decision and its outcome as tables, at 80 columns or wider."""

from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from protos import scheduler_pb2 as pb
from protos.decision_pb2 import Alternative, Decision, PlanStage

_BAR = 8


def decision_report(decision: Decision) -> RenderableType:
    """The plan, why it was chosen, and what else there was."""
    parts: list[RenderableType] = [_heading("Plan", _summary(decision))]
    if decision.stages:
        parts.append(plan_table(decision))
    if not decision.feasible:
        parts.append(Text(decision.reason, style="red"))
    if decision.reasons:
        parts.append(_heading("Why"))
        parts.extend(Text(f"  - {reason}", overflow="fold") for reason in decision.reasons)
    if decision.alternatives:
        parts.append(_heading("Alternatives"))
        parts.append(alternatives_table(decision))
    if decision.probabilities:
        parts.append(_heading("The agent's probabilities"))
        parts.append(probabilities_table(decision))
    return Group(*parts)


def outcome_report(status: pb.JobStatus, decision: Decision | None) -> RenderableType:
    """How a finished job went: predicted against measured, metrics, where the model is."""
    parts: list[RenderableType] = []
    if decision is not None and decision.HasField("measured"):
        parts += [_heading("Predicted and measured"), measured_table(decision)]
    if status.metrics:
        parts.append(_heading("Quality"))
        parts.append(metrics_table(status))
    if status.state == pb.SUCCEEDED:
        seconds = status.ended_at - status.submitted_at
        parts.append(Text(""))
        parts.append(Text(f"Job {status.job_id} succeeded in {duration(seconds)}.", style="green"))
        if status.output:
            parts.append(Text(f"Model saved in {status.output}", overflow="fold", no_wrap=False))
    elif status.reason:
        parts.append(Text(f"Job {status.job_id} {state_name(status.state)}:", style="red"))
        parts.append(Text(status.reason, overflow="fold"))
    return Group(*parts)


def plan_table(decision: Decision) -> Table:
    """One row a stage."""
    table = _table("stage", "layers", "type", ">units", ">compute", ">transfer", ">memory", "")
    names = [layer.name for layer in decision.workload.layers]
    for number, stage in enumerate(decision.stages):
        inside = names[stage.first : stage.last + 1] or [f"{stage.first}-{stage.last}"]
        table.add_row(
            str(number),
            ", ".join(inside),
            _type_name(decision, stage.type),
            str(stage.units),
            per_sample(stage.compute_s),
            per_sample(stage.transfer_s),
            size(stage.memory_bytes),
            "bottleneck" if stage.bottleneck else "",
        )
    if decision.ps_units:
        table.add_row(
            "ps", "parameter servers", decision.workload.ps_type, str(decision.ps_units), *[""] * 4
        )
    return table


def alternatives_table(decision: Decision) -> Table:
    """What the other methods came to, cheapest first."""
    table = _table("method", "plan", ">samples/s", ">$/h", ">cost $", "")
    chosen = decision.cost
    ranked = sorted(decision.alternatives, key=lambda a: (not a.feasible, a.cost))
    table.add_row(
        f"{decision.method} *",
        _stages(decision.stages),
        rate(decision.throughput),
        money(decision.price_per_hour),
        money(decision.cost),
        "chosen",
    )
    for other in ranked:
        if other.feasible:
            row = [rate(other.throughput), money(other.price_per_hour), money(other.cost)]
            row.append(_against(other, chosen))
        else:
            row = ["", "", "", "infeasible"]
        table.add_row(other.method, _stages(other.stages), *row)
    return table


def probabilities_table(decision: Decision) -> Table:
    """How sure the agent was of each layer's type."""
    types = [t.name for t in decision.resources.types]
    table = _table("layer", *types)
    for layer, chosen in zip(decision.probabilities, decision.assignment, strict=False):
        cells = []
        for name in types:
            share = layer.by_type.get(name, 0.0)
            bar = "█" * round(share * _BAR)
            cells.append(Text(f"{share:4.0%} {bar}", style="bold" if name == chosen else "dim"))
        table.add_row(layer.layer, *cells)
    return table


def measured_table(decision: Decision) -> Table:
    """The prediction beside what happened."""
    measured = decision.measured
    emulated = " (emulated)" if measured.emulated else ""
    table = _table("", ">predicted", f">measured{emulated}", ">measured/predicted")
    rows = [
        ("throughput, samples/s", decision.throughput, measured.throughput, rate),
        ("price, $/h", decision.price_per_hour, measured.price_per_hour, money),
        ("cost of training, $", decision.cost, measured.cost, money),
    ]
    for name, before, after, shape in rows:
        ratio = f"{after / before:.2f}" if before else ""
        table.add_row(name, shape(before), shape(after), ratio)
    for number, (stage, busy) in enumerate(zip(decision.stages, measured.stage_s, strict=False)):
        ratio = f"{busy / stage.compute_s:.2f}" if stage.compute_s else ""
        table.add_row(
            f"stage {number} compute a sample", per_sample(stage.compute_s), per_sample(busy), ratio
        )
    return table


def metrics_table(status: pb.JobStatus) -> Table:
    """Metrics by split."""
    splits: dict[str, dict[str, float]] = {}
    for name, value in status.metrics.items():
        split, _, metric = name.partition("_")
        splits.setdefault(split, {})[metric] = value
    metrics = sorted({m for values in splits.values() for m in values})
    table = _table("split", *(f">{m}" for m in metrics))
    for split in sorted(splits, reverse=True):
        table.add_row(split, *(f"{splits[split].get(m, float('nan')):.4f}" for m in metrics))
    return table


def jobs_table(jobs: Sequence[pb.JobStatus]) -> Table:
    """One row a job."""
    table = _table("job", "state", ">progress", ">samples/s", ">loss", "quality")
    for job in jobs:
        done = f"{job.step / job.total_steps:.0%}" if job.total_steps else ""
        quality = ", ".join(f"{k} {v:.4f}" for k, v in sorted(job.metrics.items()) if "auc" in k)
        training = job.step > 0
        table.add_row(
            job.job_id,
            state_name(job.state),
            done,
            rate(job.samples_per_s) if training else "",
            f"{job.loss:.4f}" if training else "",
            quality or (job.reason.splitlines() or [""])[0],
        )
    return table


def nodes_table(nodes: Sequence[pb.NodeStatus]) -> Table:
    """One row a node or standing shard."""
    table = _table("node", "type", ">units", ">used", "address", "processes")
    for node in nodes:
        running = [f"{p.label} (pid {p.pid})" for p in node.processes if p.running]
        name = f"{node.type} (emulated)" if node.emulated else node.type or node.kind
        table.add_row(
            node.node_id,
            name,
            str(node.units),
            str(node.units_used),
            node.address,
            ", ".join(running),
        )
    return table


def state_name(state: int) -> str:
    """A job state in lower case."""
    return pb.JobState.Name(state).lower()  # type: ignore[arg-type]


def rate(value: float) -> str:
    """Samples a second."""
    return f"{value:,.0f}"


def money(value: float) -> str:
    """Dollars with as many digits as matter."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.4g}"


def per_sample(seconds: float) -> str:
    """Seconds a sample, in microseconds."""
    return f"{seconds * 1e6:.2f} µs"


def size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def show(console: Console, *parts: RenderableType) -> None:
    """Print parts one below the other."""
    for part in parts:
        console.print(part)


def _summary(decision: Decision) -> str:
    if not decision.feasible:
        return f"none found by {decision.method}"
    gap = f", {decision.gap:.1%} above the bound" if decision.gap > 1e-9 else ", proven cheapest"
    if not decision.lower_bound:
        gap = ""
    return (
        f"by {decision.method}: {rate(decision.throughput)} samples/s, "
        f"${money(decision.price_per_hour)}/h, ${money(decision.cost)} in all{gap}"
    )


def _stages(stages: Sequence[PlanStage]) -> str:
    return " → ".join(f"{s.units}×{s.type}[{s.first}-{s.last}]" for s in stages) or "none"


def _against(other: Alternative, cost: float) -> str:
    if not cost:
        return ""
    change = other.cost / cost - 1
    return "same cost" if abs(change) < 1e-6 else f"{change:+.0%}"


def _type_name(decision: Decision, name: str) -> str:
    notes = []
    if any(t.name == name and t.emulated for t in decision.resources.types):
        notes.append("emulated")
    if any(name in layer.cost and layer.cost[name].estimated for layer in decision.workload.layers):
        notes.append("estimated")
    return f"{name} ({', '.join(notes)})" if notes else name


def _heading(title: str, text: str = "") -> Text:
    return Text.assemble("\n", (title, "bold"), f"  {text}" if text else "")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return table
