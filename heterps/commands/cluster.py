"""The cluster that stays: up, down, status."""

import os
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import click

from heterps.commands import named, options
from heterps.errors import OK, UNREACHABLE, ContextError, HeterpsError
from heterps.home import local


@click.command()
@options.units
@click.option(
    "--type",
    "types",
    multiple=True,
    metavar="TYPE[=N]",
    help="Also offer N (1) units of a type whose device is here, such as h200=1.",
)
@options.emulate
@options.redis_url
@click.option(
    "--bind",
    default="127.0.0.1:0",
    metavar="HOST:PORT",
    show_default=True,
    help="Where the scheduler listens; port 0 picks a free one.",
)
@options.as_json
@click.option(
    "--on",
    type=click.Choice(["ray"]),
    help="Start the nodes on the Ray cluster that this machine belongs to, as many units as its "
    "Ray nodes declare as resources heterps:TYPE, or as --type says.",
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="With --on ray, that of the Ray cluster.  [default: $RAY_ADDRESS, else the one here]",
)
def up(
    units: int | None,
    types: tuple[str, ...],
    emulate: tuple[str, ...],
    redis_url: str | None,
    bind: str,
    as_json: bool,
    on: str | None,
    address: str | None,
) -> int:
    """Start a cluster that stays until `heterps down`."""
    from heterps import report
    from heterps.cluster import supervisor
    from heterps.home import contexts
    from heterps.report.progress import step

    if address is not None and on is None:
        raise click.UsageError("--address goes with --on ray")
    ray = (address or os.environ.get("RAY_ADDRESS") or "auto") if on == "ray" else None
    emulated = options.types_of(emulate, "--emulate")
    cores = units or (None if ray else os.cpu_count() or 1)
    offered = {"cpu": cores} if cores else {}
    offered |= {**options.types_of(types, "--type"), **emulated}
    console = report.console(stderr=as_json)
    with step(console, "starting the cluster"):
        running = supervisor.up(offered, list(emulated), redis_url=redis_url, bind=bind, ray=ray)
    if as_json:
        options.print_json(
            {"up": True, "types": offered, "emulated": [*emulated], **_shown(running)}
        )
        return OK
    shown = [f"{n} {t}{' (emulated)' if t in emulated else ''}" for t, n in offered.items()]
    shown = shown or ["all that Ray declares"]
    console.print(f"cluster up at {running.address} with {', '.join(shown)}", soft_wrap=True)
    for role in running.roles:
        if role.label == "console":
            console.print(f"console at {role.address}", soft_wrap=True)
    commands = [
        ("heterps submit JOB.yaml --wait", "train on it"),
        ("heterps status", "what runs"),
        ("heterps down", "end it"),
    ]
    chosen = ""
    with suppress(ContextError):  # commands will say it; the cluster is up
        chosen = contexts.load().current
    if chosen:
        use = f"heterps context use {contexts.LOCAL}"
        commands.insert(0, (use, f"commands go to {chosen} until then"))
    console.print(report.next_commands(commands), soft_wrap=True)
    return OK


@click.command()
@options.as_json
def down(as_json: bool) -> int:
    """End the cluster that `heterps up` started, and its jobs."""
    from heterps.cluster import supervisor

    ended = supervisor.down()
    if as_json:
        options.print_json({"up": False, "ended": _shown(ended) if ended else None})
        return OK
    click.echo(f"cluster at {ended.address} is down" if ended else "no cluster is up")
    return OK


@click.command()
@options.job
@options.cluster
@options.as_json
def status(job: str | None, as_json: bool) -> int:
    """Show the cluster's processes, nodes, units and jobs. Exits with 4 when none answers.

    With JOB, an id or the beginning of one: all there is to know of that job.
    """
    from heterps import report

    if job is not None:
        return _status_of(job, as_json)
    running = local.running()
    try:
        with named.client() as client:
            address, nodes, jobs = client.address, client.nodes(), client.jobs()
            target = client.target
    except HeterpsError as error:
        if not as_json:
            raise
        options.print_json({"up": False, "reason": str(error)})
        return UNREACHABLE
    ours = running if running is not None and running.address == address else None
    alive = {role.pid: _alive(role.pid) for role in ours.roles} if ours else {}
    if as_json:
        roles = [asdict(role) | {"alive": alive[role.pid]} for role in ours.roles] if ours else []
        value = {"up": True, "address": address, "roles": roles}
        value["nodes"] = [asdict(node) for node in nodes]
        value["jobs"] = [job.to_json() for job in jobs]
        options.print_json(value)
        return OK
    console = report.console()
    console.print(f"scheduler at {target}", soft_wrap=True)
    if ours:
        from heterps.view.figures import duration

        console.print(f"up for {duration(time.time() - ours.started_at)}, logs in {ours.directory}")
        console.print()
        report.show(console, report.roles_table(ours.roles, alive))
    console.print()
    if nodes:
        report.show(console, report.nodes_table(nodes))
    else:
        console.print("no nodes: start one with `heterps node`")
    console.print()
    if jobs:
        report.show(console, report.jobs_table(jobs))
    else:
        console.print("no jobs yet: submit one with `heterps submit JOB.yaml`")
    return OK


def _status_of(name: str, as_json: bool) -> int:
    from heterps import report
    from heterps.commands import lookup

    client, job = lookup.find(name)
    if client is not None:
        client.close()
    if as_json:
        options.print_json(job.to_json())
        return OK
    console = report.console()
    report.show(console, report.job_report(job))
    console.print(report.next_commands(report.job_commands(job)), soft_wrap=True)
    return OK


def _shown(running: local.Running) -> dict[str, Any]:
    """A cluster for programs, in the words of `status`."""
    roles = [asdict(role) for role in running.roles]
    return {"address": running.address, "directory": running.directory, "roles": roles}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
