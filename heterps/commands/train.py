"""Training on a cluster of one's own."""

import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heterps.commands import options
from heterps.commands.own_cluster import (
    Offer,
    interrupt,
    keep_record,
    look_up_weights,
    uninterrupted,
)
from heterps.errors import INTERRUPTED, JOB_FAILED, HeterpsError

if TYPE_CHECKING:
    from rich.console import Console

    from protos.job_pb2 import JobSpec


@click.command()
@options.job_file
@options.overrides
@options.units
@options.emulate
@options.redis_url
@options.warm_start
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the newest checkpoint that a run of this job has left in its output folder.",
)
@click.option("--keep", is_flag=True, help="Leave the cluster up afterwards, as `heterps up` does.")
@options.as_json
def train(
    job_file: Path,
    overrides: tuple[str, ...],
    units: int | None,
    emulate: tuple[str, ...],
    redis_url: str | None,
    warm_start: str | None,
    resume: bool,
    keep: bool,
    as_json: bool,
) -> int:
    """Train JOB.yaml on a cluster of its own on this machine.

    Starts every role as a process on loopback, plans, trains, reports, and ends them all.
    Ctrl-C cancels the job and ends them, too.
    """
    from heterps import report
    from heterps.commands import following
    from heterps.job.data import prepare_and_check
    from heterps.job.file import load_job
    from heterps.job.resume import running
    from heterps.report.progress import step

    signal.signal(signal.SIGTERM, interrupt)
    console = report.console(stderr=as_json)
    job = load_job(job_file, (*overrides, *options.beginning(warm_start, resume)))
    job.output = job.output or "runs"
    look_up_weights(job)
    if resume:
        _go_on(console, job)
    offer = Offer.of(job, units, emulate)
    offer.emulate_in(job)
    with (
        offer.cluster(console, redis_url, keep) as started,
        ExitStack() as stack,
    ):
        with step(console, f"preparing {job.data.path}") as detail:
            prepare_and_check(job, detail)
        client = started()
        job_id = client.submit_prepared(job)  # its processes read code and data where they are
        stack.enter_context(running(Path(job.directory, job.output), job_id))
        console.print(f"job {job_id} on {offer}")
        offer.tell_absent(console)
        try:
            ended, decision = following.follow_job(console, client, job_id)
        except KeyboardInterrupt:
            with uninterrupted():
                console.print(f"\ncancelling {job_id} …")
                with suppress(HeterpsError):
                    client.cancel(job_id)
                keep_record(client, job_id)
            console.print(f"{job_id} cancelled")
            if job.train.checkpoint.every:
                console.print(f"go on with `heterps train {job_file} --resume`")
            return INTERRUPTED
        keep_record(client, job_id)
        code = following.exit_code(ended, decision)
        if code == JOB_FAILED:
            console.print(f"  logs: heterps logs {job_id}")
        elif not code:
            console.print(report.next_commands(_next(job_id, ended.output)), soft_wrap=True)
    if as_json:
        options.print_json(following.result_json(ended, decision))
    return code


def _go_on(console: "Console", job: "JobSpec") -> None:
    """Have the job go on from the newest checkpoint of its name in the output folder."""
    from heterps.client.origins import check_same
    from heterps.job.resume import newest

    found = newest(job)
    origin = found.origin
    check_same(job, found.job, origin.job_id)
    job.train.warm_start = ""
    job.train.resume.CopyFrom(origin)
    del job.train.routes[:]
    job.train.routes.extend(found.job.train.routes)
    console.print(f"goes on from step {origin.step} of {origin.job_id}", soft_wrap=True)


def _next(job_id: str, output: str) -> list[tuple[str, str]]:
    commands = [
        (f"heterps inspect {job_id}", "this report again"),
        (f"heterps logs {job_id}", "what its processes wrote"),
    ]
    if output:
        use = f"python -c \"import heterps; model = heterps.load('{output}')\""
        commands.append((use, "use the model"))
    return commands
