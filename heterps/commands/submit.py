"""Handing a job to the running cluster."""

from pathlib import Path

import click

from heterps.commands import complete, named, options
from heterps.errors import INTERRUPTED, OK


@click.command()
@options.optional_job_file
@options.overrides
@options.warm_start
@click.option(
    "--resume",
    metavar="JOB[@STEP]",
    shell_complete=complete.cuts,
    help="Go on from a checkpoint of a job that has ended, with its model, data and code.",
)
@click.option("--id", "job_id", help="The job's id: submitting it again changes nothing.")
@click.option("--priority", type=int, help="Jobs of a higher one leave the queue first.")
@click.option(
    "--no-code", is_flag=True, help="Do not send the code: nodes find it at the same path."
)
@click.option("--wait", is_flag=True, help="Follow the job to its end, and exit as it does.")
@options.cluster
@options.as_json
def submit(
    job_file: Path | None,
    overrides: tuple[str, ...],
    warm_start: str | None,
    resume: str | None,
    job_id: str | None,
    priority: int | None,
    no_code: bool,
    wait: bool,
    as_json: bool,
) -> int:
    """Check JOB.yaml, make its data, send its code, and hand it to the running cluster.

    The code is the folder of JOB.yaml, or the one that its `code` names, without what
    .heterpsignore leaves out. With --wait, Ctrl-C leaves the job running.

    With --resume JOB.yaml may be left out: then the job has all that JOB had. Where it is given,
    its plan, servers and output count; model, data and training must be those of JOB.
    """
    from heterps import report
    from heterps.commands import following
    from heterps.job.file import load_job
    from heterps.report.progress import step

    console = report.console(stderr=as_json)
    if priority is not None:
        overrides = (*overrides, f"priority={priority}")
    overrides = (*overrides, *options.beginning(warm_start, resume))
    if job_file is None and (resume is None or overrides):
        raise click.UsageError("Missing argument 'JOB.yaml'; only --resume alone does without")
    job = load_job(job_file, overrides) if job_file is not None else None
    with named.client() as client:
        client.ping()
        left_out: list[str] = []
        doing = f"looking up {resume}" if resume or job is None else f"preparing {job.data.path}"
        with step(console, doing) as detail:

            def on_left_out(line: str) -> None:
                detail(line)
                left_out.append(line)

            submitted = client.submit(
                job,
                job_id,
                on_line=detail,
                code=not no_code,
                on_left_out=on_left_out,
                resume=resume,
            )
        for line in left_out:
            console.print(line, soft_wrap=True, highlight=False)
        if not wait:
            if as_json:
                options.print_json({"job_id": submitted})
                return OK
            console.print(f"submitted {submitted}")
            commands = [
                (f"heterps logs -f {submitted}", "follow what it prints"),
                (f"heterps inspect {submitted}", "its plan and how it goes"),
                (f"heterps get {submitted}", "its model, once it has ended"),
                (f"heterps cancel {submitted}", "stop it"),
            ]
            console.print(report.next_commands(commands), soft_wrap=True)
            return OK
        try:
            ended, decision = following.follow_job(console, client, submitted)
        except KeyboardInterrupt:
            console.print(f"\n{submitted} goes on; stop it with `heterps cancel {submitted}`")
            return INTERRUPTED
    if as_json:
        options.print_json(following.result_json(ended, decision))
    return following.exit_code(ended, decision)
