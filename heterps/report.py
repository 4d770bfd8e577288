"""What a person reads: a decision and its outcome as tables, at 80 columns or wider."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heterps.figures import duration, money, per_sample, rate, size
from heterps.home import Role
from heterps.reasons import shortened
from heterps.records import Job, Node, State

if TYPE_CHECKING:
    from scheduler import Decision
    from scheduler.cost import PlanStage

_BAR = 8
_EMULATED, _ESTIMATED = "emulated", "estimated"
STYLES = {State.SUCCEEDED: "green", State.FAILED: "red", State.CANCELLED: "yellow"}


def console(*, stderr: bool = False) -> Console:
    """The terminal, or plain text of 80 columns where there is none."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def show(console: Console, *parts: RenderableType) -> None:
    """Print parts one below the other, without padding at the ends of lines in a pipe."""
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    for line in captured.get().splitlines():
        console.print(line.rstrip(), soft_wrap=True)


def decision_report(decision: "Decision") -> RenderableType:
    """The plan, why it was chosen, what else there was, and what the agent thought."""
    parts: list[RenderableType] = [_heading("Plan"), _summary(decision)]
    if decision.stages:
        parts += [Text(), _indented(plan_table(decision))]
        parts.append(Text("  CT, DT: computation and communication for one sample", style="dim"))
    reasons = [text for text in decision.reasons if text.rstrip(".") != decision.reason.rstrip(".")]
    if reasons:
        parts += [_heading("Why"), *(_bullet(reason) for reason in reasons)]
    if decision.alternatives:
        parts += [_heading("Alternatives"), _indented(alternatives_table(decision))]
    if decision.probabilities:
        title = "How sure the agent was (share of its plans, by layer)"
        parts += [_heading(title), _indented(probabilities_table(decision))]
    notes = _notes(decision)
    if notes:
        parts += [Text(), *(_indented(Text(note, style="yellow")) for note in notes)]
    return Group(*parts)


def outcome_report(job: Job, decision: "Decision | None") -> RenderableType:
    """How a job ended: prediction against measurement, metrics, where the model is."""
    parts: list[RenderableType] = []
    if decision is not None and decision.measured is not None:
        parts += [_heading("Predicted and measured"), _indented(measured_table(decision))]
    if job.metrics:
        parts += [_heading("Quality"), _indented(metrics_table(job))]
    parts.append(_heading("Job"))
    took = f" in {duration(job.ended_at - job.submitted_at)}" if job.ended_at else ""
    state = Text.assemble("  ", job.job_id, " ", (str(job.state), STYLES.get(job.state, "")), took)
    parts.append(state)
    if job.reason and job.state is not State.SUCCEEDED:
        parts.append(_indented(Text(shortened(job.reason), overflow="fold")))
    if job.output and job.state is State.SUCCEEDED:
        parts.append(_indented(Text(f"model saved in {job.output}", overflow="fold")))
    return Group(*parts)


def next_commands(commands: Iterable[tuple[str, str]]) -> RenderableType:
    """What to type next: command and purpose; commands are never broken over lines."""
    lines = [Text.assemble("  ", (command, "bold"), f"  # {why}") for command, why in commands]
    return Group(_heading("Next"), *lines)


def plan_table(decision: "Decision") -> Table:
    """One row a stage."""
    table = _table("", "layers", "type", ">units", ">CT", ">DT", ">memory", "")
    for number, stage in enumerate(decision.stages):
        table.add_row(
            str(number),
            _layers(decision, stage.first, stage.last),
            _marked(decision, stage.type, range(stage.first, stage.last + 1)),
            f"{stage.units:,}",
            per_sample(stage.compute_s),
            per_sample(stage.transfer_s),
            size(stage.memory_bytes),
            Text("slowest", style="bold yellow") if stage.bottleneck else "",
        )
    if decision.ps_units:
        kind = decision.workload.ps_type if decision.workload is not None else ""
        table.add_row("", "parameter server", kind, f"{decision.ps_units:,}", "", "", "", "")
    return table


def alternatives_table(decision: "Decision") -> Table:
    """The chosen plan and what the other methods came to, cheapest first."""
    table = _table("method", "plan", ">samples/s", ">$/h", ">cost", ">took", "")
    table.add_row(
        Text(decision.method, style="bold"),
        _placement(decision.stages),
        rate(decision.throughput),
        money(decision.price_per_hour),
        money(decision.cost),
        "",
        Text("chosen", style="bold") if decision.feasible else Text("infeasible", style="red"),
    )
    for other in decision.alternatives:
        took = duration(other.seconds)
        if not other.feasible:
            table.add_row(
                other.method, _placement(other.stages), "", "", "", took, "infeasible", style="dim"
            )
            continue
        table.add_row(
            other.method,
            _placement(other.stages),
            rate(other.throughput),
            money(other.price_per_hour),
            money(other.cost),
            took,
            _against(other.cost, decision.cost) if decision.feasible else "",
        )
    return table


def probabilities_table(decision: "Decision") -> Table:
    """A bar for each layer and type; the chosen type stands out."""
    types = list(dict.fromkeys(name for row in decision.probabilities.values() for name in row))
    table = _table("layer", *types)
    for (layer, shares), chosen in zip(
        decision.probabilities.items(), decision.assignment, strict=False
    ):
        cells = []
        for name in types:
            share = shares.get(name, 0.0)
            bar = "█" * round(share * _BAR) or ("·" if share else "")
            style = "bold green" if name == chosen else "dim"
            cells.append(Text(f"{share:4.0%} {bar:<{_BAR}}", style=style))
        table.add_row(layer, *cells)
    return table


def measured_table(decision: "Decision") -> Table:
    """The prediction beside what happened."""
    measured = decision.measured
    assert measured is not None
    mark = f" ({_EMULATED})" if measured.emulated else ""
    guess = f" ({_ESTIMATED})" if _estimated(decision) else ""
    table = _table("", f">predicted{guess}", f">measured{mark}", ">ratio")
    rows = [
        ("throughput, samples/s", decision.throughput, measured.throughput, rate),
        ("price an hour", decision.price_per_hour, measured.price_per_hour, money),
        ("cost of the training", decision.cost, measured.cost, money),
    ]
    for stage, busy in zip(decision.stages, measured.stage_s, strict=False):
        name = f"stage {decision.stages.index(stage)} busy a sample"
        rows.append((name, stage.compute_s, busy, per_sample))
    for name, before, after, shape in rows:
        table.add_row(name, shape(before), shape(after), f"{after / before:.2f}" if before else "")
    return table


def metrics_table(job: Job) -> Table:
    """Metrics by split: `test_auc` stands in row test and column auc."""
    splits: dict[str, dict[str, float]] = {}
    for name, value in job.metrics.items():
        split, _, metric = name.partition("_")
        splits.setdefault(split if metric else "", {})[metric or name] = value
    names = list(dict.fromkeys(metric for values in splits.values() for metric in values))
    table = _table("split", *(f">{name}" for name in names))
    for split, values in splits.items():
        table.add_row(split, *(f"{values[n]:.4f}" if n in values else "" for n in names))
    return table


def jobs_table(jobs: Sequence[Job]) -> Table:
    """One row a job."""
    table = _table("!job", "state", ">done", ">samples/s", ">loss", "")
    for job in jobs:
        auc = ", ".join(f"{k} {v:.4f}" for k, v in job.metrics.items() if k.endswith("auc"))
        why = job.reason.splitlines()[0] if job.reason and job.state is not State.SUCCEEDED else ""
        table.add_row(
            job.job_id,
            Text(str(job.state), style=STYLES.get(job.state, "")),
            f"{job.step / job.total_steps:.0%}" if job.total_steps else "",
            rate(job.samples_per_s) if job.step else "",
            f"{job.loss:.4f}" if job.step else "",
            why or auc,
        )
    return table


def nodes_table(nodes: Sequence[Node]) -> Table:
    """One row a node or standing shard, and one a process of a job on it."""
    table = _table("!node", "!type", ">units", ">used", "!address", "hardware")
    for node in nodes:
        kind = node.type if node.kind == "node" else "shard"
        mark = f" ({_EMULATED})" if node.emulated else ""
        counts = (str(node.units), str(node.units_used)) if node.kind == "node" else ("", "")
        table.add_row(node.node_id, kind + mark, *counts, node.address, node.device)
        for process in node.processes:
            if process.running:
                what = f"{process.job_id}, pid {process.pid}"
                table.add_row(f"  {process.label}", "", "", "", "", what, style="dim")
    return table


def roles_table(roles: Sequence[Role], alive: Mapping[int, bool]) -> Table:
    """One row a process of the embedded cluster."""
    table = _table("process", ">pid", "address", "")
    for role in roles:
        state = Text("running", "green") if alive[role.pid] else Text(f"ended: {role.log}", "red")
        table.add_row(role.label, str(role.pid), role.address, state)
    return table


def _summary(decision: "Decision") -> RenderableType:
    if not decision.feasible:
        found = f"{decision.method}: {decision.reason}"
        return _indented(Text(found, style="red", overflow="fold"))
    guess = f" ({_ESTIMATED})" if _estimated(decision) else ""
    floor = f" (floor {rate(decision.min_throughput)})" if decision.min_throughput else ""
    if decision.gap < 1e-9:
        gap = "no plan costs less"
    else:
        gap = f"{decision.gap:.2%} above the lower bound {money(decision.lower_bound)}"
    lines = [
        ("by", f"{decision.method}, decided in {duration(decision.seconds)}"),
        ("throughput", f"{rate(decision.throughput)} samples/s{floor}{guess}"),
        ("price", f"{money(decision.price_per_hour)} an hour"),
        ("cost", f"{money(decision.cost)} for the training{guess}; {gap}"),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(name, style="dim"), text)
    return _indented(grid)


def _notes(decision: "Decision") -> list[str]:
    """What figures of emulated and estimated types are worth."""
    notes = []
    resources = decision.resources
    fake = [kind.name for kind in resources.types if kind.emulated] if resources else []
    if fake:
        notes.append(f"{_EMULATED}: {', '.join(fake)} run on the CPU here; measured times are its.")
    if _estimated(decision):
        notes.append(f"{_ESTIMATED}: from data sheets, for types that are not here to measure.")
    return notes


def _estimated(decision: "Decision") -> bool:
    """Whether the plan rests on figures from data sheets."""
    return decision.workload is not None and any(
        kind in layer.cost and layer.cost[kind].estimated
        for layer, kind in zip(decision.workload.layers, decision.assignment, strict=False)
    )


def _marked(decision: "Decision", kind: str, rows: Iterable[int]) -> str:
    """A type with what its figures are."""
    marks = []
    if decision.resources and any(t.name == kind and t.emulated for t in decision.resources.types):
        marks.append(_EMULATED)
    layers = decision.workload.layers if decision.workload else ()
    if any(r < len(layers) and layers[r].cost[kind].estimated for r in rows):
        marks.append(_ESTIMATED)
    return f"{kind} ({', '.join(marks)})" if marks else kind


def _layers(decision: "Decision", first: int, last: int) -> str:
    if decision.workload is None:
        return f"{first}-{last}" if last > first else str(first)
    return ", ".join(layer.name for layer in decision.workload.layers[first : last + 1])


def _placement(stages: "Sequence[PlanStage]") -> str:
    """Stages in short: `8×cpu 2×v100`."""
    return " ".join(f"{stage.units}×{stage.type}" for stage in stages)


def _against(cost: float, chosen: float) -> str:
    if chosen <= 0 or abs(cost / chosen - 1) < 1e-6:
        return "same cost"
    ratio = cost / chosen
    return f"{ratio:.1f}x" if ratio >= 10 else f"{ratio - 1:+.1%}"


def _heading(title: str) -> Text:
    return Text(f"\n{title}", style="bold cyan")


def _bullet(text: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(" -", Text(text, overflow="fold"))
    return grid


def _indented(what: RenderableType) -> RenderableType:
    return Padding(what, (0, 0, 0, 2), expand=False)


def _table(*columns: str) -> Table:
    """Columns that begin with ">" hold numbers, at the right; these and "!" are never broken."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for column in columns:
        number = column.startswith(">")
        table.add_column(
            column.lstrip(">!"),
            justify="right" if number else "left",
            overflow="fold",
            no_wrap=column.startswith((">", "!")),
        )
    return table
