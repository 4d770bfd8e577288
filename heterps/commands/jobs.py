"""Jobs: train, submit, jobs, logs, cancel, inspect."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console

from heterps import report
from heterps.client import Client, JobNotFoundError
from heterps.errors import CANCELLED, JOB_FAILED, OK, explained, print_json
from protos import scheduler_pb2 as pb
from protos.channels import RpcError
from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec

_set = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job file."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_job_file = click.argument("job_file", metavar="JOB.yaml", type=click.Path(path_type=Path))
_job = click.argument("job", required=False)


@click.command()
@_job_file
@_set
@click.option(
    "--emulate", multiple=True, metavar="TYPE", help="Offer a type without its device, on the CPU."
)
@click.option("--units", type=click.IntRange(1), help="CPU units to offer; all cores by default.")
@click.option("--logs", "directory", type=click.Path(path_type=Path), help="Keep the logs here.")
@_json
@explained
def train(
    job_file: Path,
    overrides: tuple[str, ...],
    emulate: tuple[str, ...],
    units: int | None,
    directory: Path | None,
    as_json: bool,
) -> int:
    """Train a job on a cluster of its own on this machine.

    Starts every role as a process on loopback, submits the job, follows it, and ends them all.
    JOB is a job file; see docs/jobs.md.
    """
    from heterps.embedded import Cluster
    from heterps.jobfile import load_job
    from heterps.prepare import prepare

    console = Console(stderr=as_json)
    job = load_job(job_file, overrides)
    offered = list(dict.fromkeys([*job.schedule.emulate, *emulate]))
    _check_types(job, offered)
    _interrupt_on_sigterm()
    if job.data.prepare:
        with console.status("preparing the data"):
            prepare(job)
    types = {"cpu": units or os.cpu_count() or 1} | _gpus(job)
    with console.status("starting the cluster"):
        cluster = Cluster(directory, types=types, emulate=offered).start()
    try:
        console.print(_cluster_line(cluster.address, types, offered), highlight=False)
        with Client(cluster.address) as client:
            job_id = client.submit(job)
            return _follow(console, client, job_id, as_json=as_json, full=True)
    finally:
        cluster.stop()


@click.command()
@_job_file
@_set
@click.option("--id", "job_id", help="The job's id; submitting it twice changes nothing.")
@click.option("--wait", is_flag=True, help="Follow the job; exit as it does.")
@_json
@explained
def submit(
    job_file: Path, overrides: tuple[str, ...], job_id: str | None, wait: bool, as_json: bool
) -> int:
    """Hand a job to the running cluster."""
    console = Console(stderr=as_json)
    with Client() as client:
        chosen = client.submit(job_file, job_id=job_id, overrides=overrides)
        if wait:
            return _follow(console, client, chosen, as_json=as_json, full=True, cancel=False)
    if as_json:
        print_json({"job_id": chosen})
    else:
        console.print(f"submitted {chosen}", highlight=False)
        console.print(f"next: heterps logs -f {chosen}, heterps inspect {chosen}", highlight=False)
    return OK


@click.command()
@_json
@explained
def jobs(as_json: bool) -> int:
    """List the jobs, oldest first."""
    with Client() as client:
        found = client.jobs()
    if as_json:
        print_json([status_json(job) for job in found])
    elif found:
        Console().print(report.jobs_table(found))
    else:
        click.echo("no jobs yet: heterps submit JOB.yaml")
    return OK


@click.command()
@_job
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@explained
def logs(job: str | None, follow: bool) -> int:
    """Show what a job's processes wrote. JOB: an id or its beginning; by default the latest."""
    with Client() as client:
        for chunk in client.logs(client.find(job), follow=follow):
            for line in chunk.text.splitlines():
                click.echo(f"{chunk.process} | {line}")
    return OK


@click.command()
@_job
@_json
@explained
def cancel(job: str | None, as_json: bool) -> int:
    """Stop a job and all its processes. JOB: an id or its beginning; by default the latest."""
    with Client() as client:
        status = client.cancel(client.find(job))
    if as_json:
        print_json(status_json(status))
    else:
        click.echo(f"{status.job_id} is {report.state_name(status.state)}")
    return OK


@click.command()
@_job
@_json
@explained
def inspect(job: str | None, as_json: bool) -> int:
    """Show what the scheduler decided for a job, and how it turned out.

    JOB: an id or its beginning; by default the latest.
    """
    with Client() as client:
        status = client.status(client.find(job))
        decision = _decision(client, status.job_id)
    if as_json:
        print_json(result_json(status, decision))
        return OK
    console = Console()
    console.print(f"{status.job_id}: {report.state_name(status.state)}", highlight=False)
    if decision is None:
        console.print(status.reason or "nothing has been decided yet", highlight=False)
        return OK
    report.show(
        console, report.decision_report(decision), report.outcome_report(status, decision)
    )
    return OK


def status_json(status: pb.JobStatus) -> dict[str, Any]:
    """A job's status for programs."""
    values = {
        f.name: getattr(status, f.name)
        for f in status.DESCRIPTOR.fields
        if f.name not in ("metrics", "job", "state")
    }
    return {
        **values,
        "state": report.state_name(status.state),
        "metrics": dict(status.metrics),
    }


def decision_json(decision: Decision) -> dict[str, Any]:
    """A decision for programs: the fields of the planning contract, and what was measured."""
    from scheduler import Decision as Decided

    value = Decided.from_message(decision).to_json()
    if decision.HasField("measured"):
        value["measured"] = MessageToDict(
            decision.measured,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
    return value


def result_json(status: pb.JobStatus, decision: Decision | None) -> dict[str, Any]:
    """Status and decision together."""
    return {
        **status_json(status),
        "decision": decision_json(decision) if decision is not None else None,
    }


def _follow(
    console: Console,
    client: Client,
    job_id: str,
    *,
    as_json: bool,
    full: bool,
    cancel: bool = True,
) -> int:
    from heterps.follow import follow

    console.print(f"job {job_id}", highlight=False)
    shown = threading.Event()

    def watch() -> Any:
        for status in client.watch(job_id):
            if status.state >= pb.STARTING and not shown.is_set():
                shown.set()
                decision = _decision(client, job_id)
                if decision is not None and decision.feasible:
                    report.show(console, report.decision_report(decision))
            yield status

    try:
        status = follow(console, watch())
    except KeyboardInterrupt:
        if cancel:
            with suppress(Exception):
                client.cancel(job_id)
        raise
    decision = _decision(client, job_id)
    if as_json:
        print_json(result_json(status, decision))
    else:
        if full and decision is not None and not decision.feasible:
            report.show(console, report.decision_report(decision))
        report.show(console, report.outcome_report(status, decision))
        if status.state == pb.SUCCEEDED and status.output:
            console.print(
                f"Use it: python -c \"import heterps; model = heterps.load('{status.output}')\"",
                highlight=False,
                soft_wrap=True,
            )
    return exit_code(status)


def exit_code(status: pb.JobStatus) -> int:
    """How a command that waited for a job exits."""
    from heterps.errors import INFEASIBLE

    if status.state == pb.SUCCEEDED:
        return OK
    if status.state == pb.CANCELLED:
        return CANCELLED
    return INFEASIBLE if status.phase == "infeasible" else JOB_FAILED


def _decision(client: Client, job_id: str) -> Decision | None:
    try:
        return client.decision(job_id)
    except (JobNotFoundError, RpcError):
        return None


def _check_types(job: JobSpec, emulate: list[str]) -> None:
    from heterps.jobfile import JobFileError

    known = [t.name for t in job.schedule.offered.types]
    for name in emulate:
        if name not in known:
            raise JobFileError(
                f"--emulate {name}: {job.schedule.resources} has no such type; it has "
                f"{', '.join(known)}"
            )


def _gpus(job: JobSpec) -> dict[str, int]:
    """The GPUs of this machine, as the type of the job's resources that names them."""
    cuda = [t.name for t in job.schedule.offered.types if t.device == "cuda"]
    if not cuda or not Path("/proc/driver/nvidia").exists():
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    model = torch.cuda.get_device_name().lower()
    named = [name for name in cuda if name.lower() in model]
    return {named[0]: torch.cuda.device_count()} if named else {}


def _cluster_line(address: str, types: dict[str, int], emulate: list[str]) -> str:
    offered = [f"{units} × {name}" for name, units in types.items()]
    offered += [f"1 × {name} (emulated)" for name in emulate]
    return f"cluster at {address}: {', '.join(offered)}"


def _interrupt_on_sigterm() -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handle)


