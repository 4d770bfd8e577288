"""The agent's policy: what the shipped one was made by, and how to train one."""

import json
from pathlib import Path

import click

from heterps.commands import options
from heterps.errors import OK


@click.group()
def policy() -> None:
    """Show or train the policy that `--method ppo` plans with."""


@policy.command()
@click.option("--file", "path", type=click.Path(path_type=Path, exists=True), help="A policy file.")
@options.as_json
def show(path: Path | None, as_json: bool) -> int:
    """Print what a policy was trained by: by default the shipped one."""
    from scheduler.agent.policy import SHIPPED, load

    loaded = load(path or SHIPPED)
    if as_json:
        trees = {k: json.loads(v) for k, v in loaded.note.items() if v.startswith("{")}
        options.print_json({**loaded.note, **trees})
        return OK
    for key, value in sorted(loaded.note.items()):
        text = value
        if key == "curve":
            stages = {name: len(points) for name, points in json.loads(value).items()}
            text = ", ".join(f"{count} points of {name}" for name, count in stages.items())
        click.echo(f"{key:12} {text}")
    return OK


@policy.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Where the policy goes.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("policy-training"),
    show_default=True,
    help="Where curves and checkpoints go.",
)
@click.option(
    "--share",
    type=click.FloatRange(0, 10, min_open=True),
    default=1.0,
    show_default=True,
    help="Of the recipe's steps: 0.01 to try it out.",
)
@click.option(
    "--start",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Go on from a policy, without the warm start.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@options.as_json
def train(
    output: Path,
    directory: Path,
    share: float,
    start: Path | None,
    seed: int,
    threads: int,
    as_json: bool,
) -> int:
    """Train a policy: a warm start from the exact teacher, then PPO. Takes most of an hour."""
    from dataclasses import replace

    from scheduler.agent.training.run import Recipe
    from scheduler.agent.training.run import train as run

    recipe = replace(Recipe(), seed=seed, threads=threads)
    if share != 1.0:
        recipe = recipe.scaled(share)
    run(recipe, output, directory, lambda text: click.echo(text, err=True), start)
    if as_json:
        options.print_json({"output": str(output.absolute()), "directory": str(directory)})
    else:
        click.echo(f"wrote {output}")
    return OK
