"""Following a job: a live bar on a terminal, plain lines now and then elsewhere."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from heterps.client.records import Job, State
from heterps.view.figures import duration, rate

_LINE_EVERY_S = 5.0


def follow(
    console: Console, updates: Iterable[Job], on_update: Callable[[Job], None] = lambda job: None
) -> Job:
    """Show a job's progress until it ends; how it stood then.

    Args:
        on_update: called with each update before it is shown; may print.
    """
    show = _bar if console.is_terminal else _lines
    return deque(show(console, updates, on_update), maxlen=1)[0]


@contextmanager
def step(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Show that something takes a while; yields a function that shows a detail of it."""
    started = time.monotonic()
    if console.is_terminal:
        with console.status(f"{what} …") as status:
            yield lambda detail: status.update(f"{what}: {detail[:60]}")
    else:
        console.print(f"{what} …")
        yield lambda detail: console.print(f"  {detail}", soft_wrap=True)
    took = time.monotonic() - started
    if took >= 1.0:
        console.print(f"{what}: {duration(took)}", style="dim")


def stage_of(job: Job) -> str:
    """What the job is at, in a word."""
    return job.phase if job.state is State.RUNNING and job.phase else str(job.state)


def line(job: Job) -> str:
    """A job's progress on one line."""
    parts = [stage_of(job)]
    if job.total_steps and job.step:
        parts.append(f"step {job.step}/{job.total_steps} ({job.step / job.total_steps:.0%})")
    return "  ".join([*parts, *_figures(job)])


def _figures(job: Job) -> list[str]:
    if not job.step:
        return []
    terms = ", ".join(f"{name} {value:.4f}" for name, value in job.loss_terms.items())
    loss = f"loss {job.loss:.4f}{f' ({terms})' if terms else ''}"
    figures = [f"{rate(job.samples_per_s)} samples/s", loss]
    eta = job.eta_s
    return [*figures, f"ETA {duration(eta)}"] if eta is not None and eta >= 1 else figures


def _bar(
    console: Console, updates: Iterable[Job], on_update: Callable[[Job], None]
) -> Iterator[Job]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[steps]}"),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("queued", total=None, steps="", figures="")
        for job in updates:
            on_update(job)
            progress.update(
                task,
                description=stage_of(job),
                total=job.total_steps or None,
                completed=job.step,
                steps=f"{job.step}/{job.total_steps}" if job.total_steps else "",
                figures="  ".join(_figures(job)),
            )
            yield job


def _lines(
    console: Console, updates: Iterable[Job], on_update: Callable[[Job], None]
) -> Iterator[Job]:
    shown, said = "", 0.0
    for job in updates:
        on_update(job)
        now, what = time.monotonic(), stage_of(job)
        if not job.state.is_final and (what != shown or now - said >= _LINE_EVERY_S):
            console.print(line(job), soft_wrap=True)
            shown, said = what, now
        yield job
