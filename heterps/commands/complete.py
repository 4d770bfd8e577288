"""What a shell may complete: jobs, contexts, files. Whatever goes wrong, it says nothing."""

import os
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

_ANSWER_S = 1.0


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Jobs of the cluster that the line names, and those kept here; the latest first."""
    from heterps.client import archive

    found: dict[str, str] = {}
    with suppress(Exception):  # a line that is being typed is no place for a traceback
        found |= {job.job_id: str(job.state) for job in archive.jobs()}
    with suppress(Exception), ctx.scope(cleanup=False):  # click enters no context to complete
        found |= _live()
    return [
        CompletionItem(job_id, help=state)
        for job_id, state in reversed(found.items())
        if job_id.startswith(incomplete)
    ]


def jobs_or_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Jobs, or files where no job begins so."""
    return jobs(ctx, param, incomplete) or files(ctx, param, incomplete)


def cuts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Jobs, and behind JOB@ the steps of its checkpoints, the newest first."""
    job_id, at, _ = incomplete.partition("@")
    if not at:
        return jobs(ctx, param, incomplete)
    found: list[int] = []
    with suppress(Exception), ctx.scope(cleanup=False):
        found = _steps(job_id)
    names = [f"{job_id}@{step}" for step in reversed(found)]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def cuts_or_files(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Jobs and their checkpoints, or files where none begins so."""
    return cuts(ctx, param, incomplete) or files(ctx, param, incomplete)


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files; the shell knows them."""
    return [CompletionItem(incomplete, type="file")]


def contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of contexts."""
    from heterps.errors import ContextError
    from heterps.home.contexts import LOCAL, load

    try:
        names = load().all()
    except ContextError:
        names = [LOCAL]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _steps(job_id: str) -> list[int]:
    """The steps of a job's checkpoints."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from heterps.commands import named

    with named.client() as client:
        return [cut.step for cut in client.checkpoints(job_id)]


def _live() -> dict[str, str]:
    """The state of each of the cluster's jobs."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else it writes into the user's line
    from heterps.commands import named

    with named.client() as client:
        return {job.job_id: str(job.state) for job in client.jobs(timeout=_ANSWER_S)}
