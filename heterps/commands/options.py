"""Options and output that several commands share."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from heterps.commands import complete, named

F = TypeVar("F", bound=Callable[..., Any])
job_file = click.argument("job_file", metavar="JOB.yaml", type=click.Path(path_type=Path))
optional_job_file = click.argument(
    "job_file", metavar="[JOB.yaml]", type=click.Path(path_type=Path), required=False
)
job = click.argument("job", metavar="[JOB]", required=False, shell_complete=complete.jobs)
overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the job file, such as train.epochs=3. May be repeated.",
)
warm_start = click.option(
    "--from",
    "warm_start",
    metavar="PLACE|JOB[@STEP]",
    shell_complete=complete.cuts_or_files,
    help="Begin with the weights and rows of a model, a checkpoint or a state_dict (train.from).",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
units = click.option(
    "--units", type=click.IntRange(1), help="CPU cores to offer.  [default: all of them]"
)
emulate = click.option(
    "--emulate",
    multiple=True,
    metavar="TYPE[=N]",
    help="Offer N (1) units of a type whose device is not here; its layers run on the CPU.",
)
redis_url = click.option(
    "--redis",
    "redis_url",
    metavar="URL",
    help="Use this Redis.  [default: $HETERPS_REDIS, else one of its own]",
)
JOB_HELP = "JOB is a job's id or the beginning of one; by default the latest."


def cluster(command: F) -> F:
    """--scheduler and --context, which `named.cluster` knows; commands do not see them."""
    scheduler = click.option(
        "--scheduler",
        metavar="HOST:PORT",
        expose_value=False,
        callback=named.keep,
        is_eager=True,
        help="The scheduler.  [default: of the context, else of `heterps up`]",
    )
    context = click.option(
        "--context",
        metavar="NAME",
        expose_value=False,
        callback=named.keep,
        is_eager=True,
        shell_complete=complete.contexts,
        help="A cluster of `heterps context list`.  [default: $HETERPS_CONTEXT, else the current]",
    )
    return scheduler(context(command))


def beginning(warm_start: str | None, resume: str | bool | None) -> tuple[str, ...]:
    """What --from overrides in a job file; a path is one from here."""
    if warm_start is None:
        return ()
    if resume:
        raise click.UsageError("--from and --resume: expected one; --resume brings the weights")
    path = Path(warm_start).expanduser()
    value = str(path.absolute()) if "://" not in warm_start and path.exists() else warm_start
    return (f"train.from={json.dumps(value)}",)


def types_of(texts: tuple[str, ...], option: str) -> dict[str, int]:
    """Units by type from `TYPE` or `TYPE=N` texts."""
    types = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not name or (equals and not (number.isdecimal() and int(number) > 0)):
            raise click.BadParameter(
                f"{text!r}: expected TYPE or TYPE=N, N a whole number above 0", param_hint=option
            )
        types[name] = int(number) if equals else 1
    return types


def assignments(texts: tuple[str, ...], option: str, expected: str) -> dict[str, str]:
    """Values by key from `KEY=VALUE` texts; of a key given twice the last one counts."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key.strip() and equals and value.strip()):
            raise click.BadParameter(f"{text!r}: expected {expected}", param_hint=option)
        found[key.strip()] = value.strip()
    return found


def print_json_line(process: str, text: str) -> None:
    """A line of a process's log, as a JSON object of one line."""
    click.echo(json.dumps({"process": process, "text": text}))


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
