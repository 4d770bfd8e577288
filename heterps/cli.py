"""The command line: `heterps COMMAND`. What a command needs is imported when it runs."""

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from chassis.near import nearest
from heterps.errors import EXIT_CODES, INTERRUPTED, OK, USAGE, HeterpsError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Command: its module under heterps.commands, and a line for --help; nothing is imported for it.
_COMMANDS = {
    "train": ("train", "Train a job on a cluster of its own on this machine."),
    "sweep": ("sweep", "Train a job with many values of its keys, and keep the best."),
    "profile": ("profile", "Measure a model's layers, without a cluster."),
    "plan": ("plan", "Plan a workload file, without a cluster."),
    "policy": ("policy", "Show or train the policy that --method ppo plans with."),
    "up": ("cluster", "Start a cluster that stays, here or on Ray."),
    "down": ("cluster", "End the cluster that `up` started."),
    "status": ("cluster", "Show the cluster's processes, nodes and jobs."),
    "submit": ("submit", "Hand a job to the running cluster."),
    "jobs": ("jobs", "List the jobs."),
    "decisions": ("decisions", "List what was decided for jobs, and how it turned out."),
    "inspect": ("decisions", "Show a job's plan, the reasons for it, and how it turned out."),
    "diff": ("decisions", "Show what is different between two decisions."),
    "replan": ("replan", "Say whether another plan would pay, by what was measured."),
    "console": ("console", "Show jobs, decisions and nodes in a browser."),
    "tensorboard": ("tensorboard", "Write a job's curves as TensorBoard event files."),
    "logs": ("jobs", "Show what a job's processes wrote."),
    "cancel": ("jobs", "Stop a job."),
    "move": ("jobs", "Have a running job go over to another plan."),
    "checkpoints": ("checkpoints", "List a job's checkpoints, from which jobs can go on."),
    "predict": ("predict", "Predict rows of a file with a saved model."),
    "export": ("export", "Write a saved model for other programs to serve."),
    "experts": ("experts", "Trace which experts a model needs, and replay it with less memory."),
    "get": ("get", "Fetch a job's model, metrics and decision."),
    "scheduler": ("rooms", "Run the scheduler."),
    "node": ("rooms", "Run the daemon of one host."),
    "drain": ("drain", "Have a node end once its jobs have left it."),
    "ps": ("ps", "Run one parameter-server shard, or look into those that run."),
    "context": ("context", "Name clusters, and choose the one that commands use."),
    "completion": ("completion", "Print the script that completes commands in a shell."),
    "certs": ("certs", "Make TLS certificates and a token, for more than one machine."),
    "token": ("token", "Let people in by tokens of their own, with roles, and out again."),
}
PROGRAM = "heterps"


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        from importlib import import_module

        command = getattr(import_module(f"heterps.commands.{_COMMANDS[cmd_name][0]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list["CompletionItem"]:
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=line)
            for name, (_, line) in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        wrong = args and args[0] not in _COMMANDS and not args[0].startswith("-")
        if wrong and not ctx.resilient_parsing:
            near = nearest(args[0], _COMMANDS)
            hint = f" Did you mean {near}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        click.echo(f"heterps {version('heterps')}")
    except PackageNotFoundError:
        click.echo("heterps (run from its source, not installed)")
    ctx.exit()


@click.group(
    cls=_Lazy,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
def heterps() -> None:
    """Train recommendation and mixture-of-experts models on mixed machines, for the least money.

    Begin with `heterps train JOB.yaml`: it needs no cluster.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Expected errors are printed as a few lines."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a bar must not fail in a terminal without Unicode
    try:
        code = heterps.main(argv, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else OK
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read has gone; nothing is left to say
        return OK
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return OK
    except click.ClickException as error:
        error.show()
        return USAGE
    except HeterpsError as error:
        return _fail(_with_next(error, argv), error.exit_code)
    except (ValueError, RuntimeError) as error:
        if not _is_explained(error):
            raise
        return _fail(_with_next(error, argv), USAGE)


def _with_next(error: Exception, argv: Sequence[str] | None) -> str:
    """The message, with what to type next: what it names itself, else the same again."""
    text = f"error: {error}"
    if f"`{PROGRAM} " in text or "Type `" in text or "with `" in text:
        return text
    typed = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in typed if not word.startswith("-")), "")
    again = shlex.join([PROGRAM, *typed])
    helped = shlex.join([PROGRAM, *([command] if command in _COMMANDS else []), "--help"])
    return f"{text}\nMend that and type `{again}` again; see also `{helped}`."


def _fail(text: str, code: int) -> int:
    click.echo(text, err=True)
    return code


def _is_explained(error: Exception) -> bool:
    """Whether the message was written for the user."""
    from chassis.security import SecurityError
    from heterps.job.file import JobFileError
    from scheduler.problem.fields import InputError

    return isinstance(error, JobFileError | InputError | SecurityError)


if __name__ == "__main__":
    sys.exit(main())
