"""The states of a job from which it, or another, can go on."""

import click

from heterps.commands import lookup, options
from heterps.errors import OK


@click.command(help=f"List a job's checkpoints, the newest last. {options.JOB_HELP}")
@options.job
@options.cluster
@options.as_json
def checkpoints(job: str | None, as_json: bool) -> int:
    """Checkpoints."""
    from heterps import report
    from heterps.client.origins import there

    client, found = lookup.find(job)
    if client is not None:
        with client:
            found = client.status(found.job_id)
    cuts = there(found.cuts)
    if as_json:
        options.print_json([cut.to_json() for cut in cuts])
        return OK
    if not cuts:
        click.echo(
            f"{found.job_id} has no checkpoints; a job takes some with train.checkpoint.every"
        )
        return OK
    console = report.console()
    report.show(console, report.checkpoints_table(cuts))
    newest = f"{found.job_id}@{cuts[-1].step}"
    commands = [(f"heterps submit JOB.yaml --from {newest}", "begin another job with its weights")]
    if found.state.is_final:
        commands.insert(0, (f"heterps submit --resume {newest}", "go on from it, exactly"))
    console.print(report.next_commands(commands), soft_wrap=True)
    return OK
