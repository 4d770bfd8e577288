"""Scripts that let a shell complete commands, options, jobs, contexts and files."""

import click

from heterps.errors import OK, HeterpsError

_HELP = """Print the script that completes `heterps` in a shell.

\b
To install it, for new shells:
  bash  heterps completion bash > ~/.local/share/bash-completion/completions/heterps
  zsh   heterps completion zsh > ~/.zfunc/_heterps
        and in ~/.zshrc: fpath+=~/.zfunc; autoload -U compinit; compinit
  fish  heterps completion fish > ~/.config/fish/completions/heterps.fish

\b
To try it in this shell:
  bash  eval "$(heterps completion bash)"
  zsh   eval "$(heterps completion zsh)"
  fish  heterps completion fish | source

Bash needs version 4.4 or newer. Jobs are asked of the scheduler, which has one second.
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print a script."""
    from click.shell_completion import get_completion_class

    from heterps.cli import PROGRAM, heterps

    made = get_completion_class(shell)
    if made is None:
        raise HeterpsError(f"{shell!r}: expected bash, zsh or fish")
    click.echo(made(heterps, {}, PROGRAM, f"_{PROGRAM.upper()}_COMPLETE").source())
    return OK
