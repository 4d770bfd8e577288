"""Decisions that were made: listed, shown, drawn and compared."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heterps.commands import complete, named, options
from heterps.errors import OK, HeterpsError, NoDecisionError, UnreachableError

if TYPE_CHECKING:
    from heterps.client.records import Job, JobDecision
    from heterps.commands.lookup import Found
    from scheduler import Decision

_SHOWN = 50


@click.command()
@click.option(
    "--last",
    type=click.IntRange(1),
    metavar="N",
    default=_SHOWN,
    show_default=True,
    help="Of the latest N jobs.",
)
@options.cluster
@options.as_json
def decisions(last: int, as_json: bool) -> int:
    """List what was decided for jobs, and how it turned out; the latest last."""
    from heterps import report

    found = _decisions(last)
    if as_json:
        options.print_json([one.to_json() for one in found])
    elif found:
        report.show(report.console(), report.decisions_table(found))
    else:
        click.echo("no decisions yet; run a job with `heterps train JOB.yaml`")
    return OK


@click.command(
    help=f"""Show a job's plan, the reasons for it, and how it turned out. {options.JOB_HELP}

With --file it shows a decision that `heterps plan --export` wrote; no cluster is needed."""
)
@options.job
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    metavar="DECISION.json",
    help="Show this decision instead of a job's.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="OUT.html",
    help="Write it as one self-contained page.",
)
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    metavar="OUT.json",
    help="Write the decision with its inputs, for --file and diff.",
)
@options.cluster
@options.as_json
def inspect(
    job: str | None, file: Path | None, html: Path | None, export: Path | None, as_json: bool
) -> int:
    """Inspect."""
    from heterps.commands import following, lookup

    found: Found | None = None
    decision: Decision | None
    if file is not None:
        if job is not None:
            raise click.UsageError(f"{job!r} and --file {file}: expected one of them")
        _, decision = lookup.decision_named(str(file))
    else:
        found = lookup.find_with_decision(job)
        decision = found.decision
    if html is not None or export is not None:
        if decision is None:
            raise NoDecisionError(f"job {found.job.job_id if found else ''}: it has no decision")
        _write(decision, found.job if found else None, html, export, quiet=as_json)
        if not as_json:
            return OK
    if as_json:
        if found is not None:
            plans = [asdict(one) for one in found.plans]
            options.print_json({**following.result_json(found.job, decision), "plans": plans})
        elif decision is not None:
            options.print_json(decision.to_json())
        return OK
    if found is not None:
        _print_job(found)
    elif decision is not None:
        _print_decision(decision)
    return OK


@click.command(
    help="""Show what is different between two decisions: inputs, plan and figures.

A and B are jobs (ids or their beginnings) or files that `heterps plan --export` wrote."""
)
@click.argument("first", metavar="A", shell_complete=complete.jobs_or_files)
@click.argument("second", metavar="B", shell_complete=complete.jobs_or_files)
@options.cluster
@options.as_json
def diff(first: str, second: str, as_json: bool) -> int:
    """Compare."""
    from heterps import report
    from heterps.commands import lookup
    from heterps.view import changes

    first_name, before = lookup.decision_named(first)
    second_name, after = lookup.decision_named(second)
    if as_json:
        options.print_json(changes.compare(before, after).to_json())
        return OK
    if first_name == second_name:
        first_name, second_name = first, second
    report.show(report.console(), report.diff_report(first_name, before, second_name, after))
    return OK


def _decisions(last: int) -> "list[JobDecision]":
    """Of the latest jobs kept here and on the cluster."""
    from heterps.client import archive

    here = {one.job_id: one for one in archive.decisions(last)}
    problem: HeterpsError | None = None
    try:
        with named.client() as client:
            here |= {one.job_id: one for one in client.decisions(last)}
    except UnreachableError as error:
        problem = error
    if not here and problem is not None:
        raise problem
    return sorted(here.values(), key=lambda one: one.decided_at)[-last:]


def _write(
    decision: "Decision", job: "Job | None", html: Path | None, export: Path | None, quiet: bool
) -> None:
    if export is not None:
        decision.export(export)
    if html is not None:
        from heterps.page import with_curve, write_page

        write_page(with_curve(decision), html, job)
    for path in (html, export):
        if path is not None and not quiet:
            click.echo(f"wrote {path}")


def _print_decision(decision: "Decision") -> None:
    from heterps import report

    console = report.console()
    report.show(console, report.decision_report(decision))
    if decision.measured is not None:
        report.show(console, report.measured_report(decision))


def _print_job(found: "Found") -> None:
    from heterps import report
    from heterps.report.plans import plans_report
    from heterps.report.progress import line
    from heterps.report.proposal import proposal_line

    console = report.console()
    job, decision = found.job, found.decision
    if decision is not None:
        report.show(console, report.decision_report(decision))
    report.show(console, report.outcome_report(job, decision))
    if len(found.plans) > 1:
        report.show(console, plans_report(found.plans))
    if not job.state.is_final:
        console.print(f"  {line(job)}")
    if found.proposal is not None:
        report.show(console, proposal_line(found.proposal, job.job_id))
    commands = [(f"heterps logs {job.job_id}", "what its processes wrote")]
    if decision is not None:
        page = f"heterps inspect {job.job_id} --html {job.job_id}.html"
        commands.append((page, "the same with pictures"))
    if not job.state.is_final:
        commands.append((f"heterps cancel {job.job_id}", "stop it"))
    console.print(report.next_commands(commands), soft_wrap=True)
