"""Tokens for people and programs: made, listed, revoked."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heterps.commands import named, options
from heterps.errors import OK, USAGE, HeterpsError

if TYPE_CHECKING:
    from heterps.client.records import Token


@click.group()
def token() -> None:
    """Let people and programs into a cluster, each by a token with a name and a role.

    read sees all jobs and nodes and changes nothing. submit submits jobs, and sees, cancels and
    fetches those of its own name alone. operate does that with the jobs of all.
    """


@token.command()
@click.argument("name")
@click.option(
    "--role", required=True, type=click.Choice(("read", "submit", "operate")), help="What it may."
)
@click.option("--expires", metavar="TIME", help="Good for 12h, 30d, …  [default: for ever]")
@click.option(
    "--to",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the secret there, for its owner alone, in place of printing it.",
)
@options.cluster
@options.as_json
def create(name: str, role: str, expires: str | None, to: Path | None, as_json: bool) -> int:
    """Make a token, with the cluster's own. Its secret is told this once.

    NAME is the user that its jobs are of. Whoever gets it names the file with the secret in
    HETERPS_TOKEN_FILE, or with `heterps context set CLUSTER --token-file FILE`.
    """
    from chassis.files import replace_file
    from scheduler.problem.demands import hours_of

    expires_s = hours_of("--expires", expires) * 3600 if expires is not None else 0.0
    if to is not None and to.exists():
        raise HeterpsError(f"--to {to}: is there already; expected the name of a new file")
    with named.client() as client:
        made = client.create_token(name, role, expires_s)
        if to is not None:
            try:
                replace_file(to, made.secret + "\n", private=True)
            except OSError as error:
                client.revoke_token(name)  # nobody has it
                raise HeterpsError(f"--to {to}: {error.strerror}; no token was made") from None
    shown = {} if to is not None else {"secret": made.secret}
    if as_json:
        options.print_json({**_entry(made), **shown})
    elif to is None:
        click.echo(made.secret)
    else:
        click.echo(f"token {name} ({role}) is in {to}")
    return OK


@token.command("list")
@options.cluster
@options.as_json
def list_(as_json: bool) -> int:
    """List the tokens, without their secrets."""
    with named.client() as client:
        found = client.tokens()
    if as_json:
        options.print_json([_entry(one) for one in found])
        return OK
    if not found:
        click.echo("no tokens yet; make one with `heterps token create NAME --role ROLE`")
        return OK
    from heterps import report
    from heterps.report.terminal import table

    made = table("!name", "role", "made", "by", "expires")
    for one in found:
        over = bool(one.expires_at) and one.expires_at <= time.time()
        until = "expired" if over else _day(one.expires_at)
        made.add_row(one.name, one.role, _day(one.created_at), one.created_by, until)
    report.show(report.console(), made)
    return OK


@token.command()
@click.argument("name")
@options.cluster
@options.as_json
def revoke(name: str, as_json: bool) -> int:
    """Make a token open nothing from now on.

    What it has open ends within seconds. Jobs of its user run on: `heterps cancel` ends them.
    """
    with named.client() as client:
        revoked = client.revoke_token(name)
    if as_json:
        options.print_json({"name": name, "revoked": revoked})
    elif not revoked:
        click.echo(f"token {name!r}: there is none; see all with `heterps token list`", err=True)
    else:
        click.echo(f"token {name} is revoked")
    return OK if revoked else USAGE


def _entry(one: "Token") -> dict[str, object]:
    names = ("name", "role", "created_at", "created_by", "expires_at")
    return {name: getattr(one, name) for name in names}


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else "never"
