"""The command line: `heterps COMMAND`. What a command needs is imported when it runs."""

import click

from heterps import __version__
from heterps.errors import EXIT_CODES

_HOMES = {
    "train": "jobs",
    "submit": "jobs",
    "jobs": "jobs",
    "logs": "jobs",
    "cancel": "jobs",
    "inspect": "jobs",
    "up": "cluster",
    "down": "cluster",
    "status": "cluster",
    "plan": "planning",
    "ps": "roles",
    "node": "roles",
    "scheduler": "roles",
    "certs": "certs",
}
_HELP = {
    "train": "Train a job on a cluster of its own on this machine.",
    "submit": "Hand a job to the running cluster.",
    "jobs": "List the jobs.",
    "logs": "Show what a job's processes wrote.",
    "cancel": "Stop a job.",
    "inspect": "Show what the scheduler decided for a job, and how it turned out.",
    "up": "Start a cluster on this machine that stays.",
    "down": "Stop the cluster that `up` started.",
    "status": "Show the cluster's processes, nodes and jobs.",
    "plan": "Decide for a workload file, without a cluster.",
    "ps": "Run one parameter-server shard.",
    "node": "Run the daemon of one host.",
    "scheduler": "Run the scheduler.",
    "certs": "Make TLS certificates and a token for a cluster beyond this machine.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = _HOMES.get(cmd_name)
        if home is None:
            return None
        from importlib import import_module

        command = getattr(import_module(f"heterps.commands.{home}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_HELP.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and args[0] not in _HOMES and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], _HOMES, 1)
            hint = f" Did you mean {close[0]}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_Lazy, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="heterps")
def main() -> None:
    """Train recommendation and mixture-of-experts models on mixed machines, for the least money.

    Begin with `heterps train JOB.yaml`.
    """


if __name__ == "__main__":
    main()
