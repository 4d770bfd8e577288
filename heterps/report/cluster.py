"""Jobs, their decisions, nodes and processes as tables."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.table import Table
from rich.text import Text

from heterps.client.records import Job, JobDecision, Node, State
from heterps.home.local import Role
from heterps.report.terminal import table
from heterps.view.figures import money, percent, rate

STYLES = {State.SUCCEEDED: "green", State.FAILED: "red", State.CANCELLED: "yellow"}


def jobs_table(jobs: Sequence[Job]) -> Table:
    """One row a job."""
    made = table("!job", "state", ">done", ">samples/s", ">loss", "")
    for job in jobs:
        auc = ", ".join(f"{k} {v:.4f}" for k, v in job.metrics.items() if k.endswith("auc"))
        why = job.reason.splitlines()[0] if job.reason and job.state is not State.SUCCEEDED else ""
        if job.state is State.FAILED and job.end_reason:
            why = f"{job.end_reason}: {job.error or why}"
        made.add_row(
            job.job_id,
            Text(str(job.state), style=STYLES.get(job.state, "")),
            f"{job.step / job.total_steps:.0%}" if job.total_steps else "",
            rate(job.samples_per_s) if job.step else "",
            f"{job.loss:.4f}" if job.step else "",
            why or auc,
        )
    return made


def decisions_table(kept: Sequence[JobDecision]) -> Table:
    """One row a decision: what it promised, how good it is, and how it turned out."""
    made = table("!job", "decided", "method", ">cost", ">gap", ">predicted", ">measured", ">ratio")
    for one in kept:
        decision = one.decision
        when = datetime.fromtimestamp(one.decided_at).strftime("%Y-%m-%d %H:%M")
        if not decision.feasible:
            made.add_row(one.job_id, when, decision.method, Text("infeasible", "red"))
            continue
        measured = decision.measured
        made.add_row(
            one.job_id,
            when,
            decision.method,
            money(decision.cost),
            percent(decision.gap),
            rate(decision.throughput),
            rate(measured.throughput) if measured else "",
            f"{measured.throughput / decision.throughput:.2f}" if measured else "",
        )
    return made


def nodes_table(nodes: Sequence[Node]) -> Table:
    """One row a node or standing shard, and one a process of a job on it."""
    made = table("!node", "!type", ">units", ">used", "!address", "hardware")
    for node in nodes:
        kind = node.type if node.kind == "node" else "shard"
        mark = " (emulated)" if node.emulated else ""
        mark += f" (drains: {node.ends_in_s:.0f} s)" if node.draining else ""
        counts = (str(node.units), str(node.units_used)) if node.kind == "node" else ("", "")
        made.add_row(node.node_id, kind + mark, *counts, node.address, node.device)
        for process in node.processes:
            if process.running:
                what = f"{process.job_id}, pid {process.pid}"
                made.add_row(f"  {process.label}", "", "", "", "", what, style="dim")
    return made


def roles_table(roles: Sequence[Role], alive: Mapping[int, bool]) -> Table:
    """One row a process of the embedded cluster."""
    made = table("process", ">pid", "address", "")
    for role in roles:
        state = Text("running", "green") if alive[role.pid] else Text(f"ended: {role.log}", "red")
        made.add_row(role.label, str(role.pid), role.address, state)
    return made
