"""The cluster that stays: up, down, status."""

import os
import signal
import time
from pathlib import Path

import click

from heterps import state
from heterps.errors import OK, UNREACHABLE, explained, print_json

_READY_S = 90.0
_DOWN_S = 30.0


@click.command()
@click.option("--units", type=click.IntRange(1), help="CPU units to offer; all cores by default.")
@click.option("--emulate", multiple=True, metavar="TYPE", help="Offer a type without its device.")
@click.option("--redis", "redis_url", metavar="URL", help="Use this server, not the bundled one.")
@click.option("--bind", default="127.0.0.1:0", show_default=True, help="The scheduler's address.")
@explained
def up(units: int | None, emulate: tuple[str, ...], redis_url: str | None, bind: str) -> int:
    """Start a cluster on this machine that stays until `heterps down`."""
    from protos.process import module_argv, spawn

    record = state.read()
    if record is not None:
        click.echo(f"a cluster is up already at {record['address']} (pid {record['pid']})")
        return OK
    directory = state.home() / "cluster"
    directory.mkdir(parents=True, exist_ok=True)
    argv = module_argv("heterps.supervisor", "--directory", str(directory), "--bind", bind)
    argv += ["--units", str(units or os.cpu_count() or 1)]
    for name in emulate:
        argv += ["--emulate", name]
    if redis_url:
        argv += ["--redis", redis_url]
    child = spawn("supervisor", argv, directory=directory)
    child.wait_ready(_READY_S)
    click.echo(f"cluster at {child.address}, logs in {directory}")
    click.echo("next: heterps submit JOB.yaml, heterps status, heterps down")
    return OK


@click.command()
@explained
def down() -> int:
    """Stop the cluster that `heterps up` started, and its jobs."""
    record = state.read()
    if record is None:
        click.echo("no cluster is up")
        return OK
    pid = int(record["pid"])
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_S
    while time.monotonic() < deadline:
        if state.read() is None:
            click.echo(f"the cluster at {record['address']} is down")
            return OK
        time.sleep(0.1)
    click.echo(f"the cluster's supervisor (pid {pid}) has not ended within {_DOWN_S:.0f} s")
    return UNREACHABLE


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@explained
def status(as_json: bool) -> int:
    """Show the cluster's processes, nodes and jobs."""
    from rich.console import Console

    from heterps import report
    from heterps.client import Client, ClusterError
    from heterps.commands.jobs import status_json

    record = state.read()
    try:
        with Client() as client:
            address, nodes, jobs = client.address, client.nodes(), client.jobs()
    except ClusterError as error:
        if as_json:
            print_json({"up": False, "reason": str(error)})
        else:
            click.echo(str(error))
        return UNREACHABLE
    if as_json:
        shown = [{f.name: getattr(n, f.name) for f, _ in n.ListFields() if f.name != "processes"}
                 | {"processes": [{f.name: getattr(p, f.name) for f, _ in p.ListFields()}
                                  for p in n.processes]} for n in nodes]
        print_json(
            {
                "up": True,
                "address": address,
                "supervisor": record,
                "nodes": shown,
                "jobs": [status_json(j) for j in jobs],
            }
        )
        return OK
    console = Console()
    console.print(f"scheduler at {address}", highlight=False)
    for role in (record or {}).get("processes", []):
        console.print(f"  {role['label']}: pid {role['pid']}", highlight=False)
    console.print(report.nodes_table(nodes))
    if jobs:
        console.print(report.jobs_table(jobs))
    if record:
        console.print(f"logs: {Path(record['directory'])}", highlight=False, soft_wrap=True)
    return OK
