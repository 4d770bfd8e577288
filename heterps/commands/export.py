"""A saved model for other programs to serve."""

from dataclasses import asdict
from pathlib import Path

import click

from heterps.commands import models, options
from heterps.errors import OK

_HELP = (
    "Write MODEL's dense part as one program, and its rows as Parquet. "
    f"{models.HELP} Beside FILE come FILE.json, which says what the program takes, and the folder "
    "FILE.tables."
)


@click.command(help=_HELP)
@models.argument
@click.option("--torch", "torch_file", metavar="FILE", help="As a program of torch.export, .pt2.")
@click.option("--onnx", "onnx_file", metavar="FILE", help="As ONNX; needs heterps[onnx].")
@click.option(
    "--sample",
    default="",
    metavar="DATA",
    help="Rows to trace with, five or more.  [default: made up]",
)
@options.cluster
@options.as_json
def export(
    model: str, torch_file: str | None, onnx_file: str | None, sample: str, as_json: bool
) -> int:
    """Export."""
    if (torch_file is None) == (onnx_file is None):
        raise click.UsageError("expected one of --torch FILE and --onnx FILE")
    with models.explained(), models.folder_of(model) as folder:
        from workers.model.saved.export import ONNX, TORCH
        from workers.model.saved.export import export as write
        from workers.model.saved.model import read_saved

        target = Path(torch_file or onnx_file or "")
        if torch_file and target.suffix != ".pt2":
            raise click.UsageError(f"--torch: {torch_file}: expected a file ending in .pt2")
        made = write(read_saved(folder), TORCH if torch_file else ONNX, target, sample)
    if as_json:
        options.print_json(asdict(made))
        return OK
    click.echo(f"{made.program}: gives {', '.join(made.outputs)} of")
    for one in made.inputs:
        rows = f", rows of {one['table']} for {one['keys']}" if "table" in one else ""
        click.echo(f"  {one['name']}{rows}")
    if made.tables:
        click.echo(f"{made.tables}: the rows, by key")
    return OK
