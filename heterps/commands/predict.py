"""Predicting rows with a saved model."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heterps.commands import models, options
from heterps.errors import OK

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from workers.data.output import OutputFile
    from workers.model.saved.predict import Predicted

_HELP = (
    f"Predict each row of DATA, in its order. {models.HELP} DATA is a .parquet, .csv, .tsv, "
    ".arrow, .feather or .tar (also .gz, .zst) file, a folder or a glob of such, or a URL, with "
    "the columns that the model's job reads; labels are not needed."
)


@click.command(help=_HELP)
@models.argument
@click.argument("data", metavar="DATA")
@click.option(
    "-o",
    "--output",
    default="predictions.parquet",
    show_default=True,
    metavar="FILE",
    help="Where to: .parquet, .csv or .tsv, or - for CSV on standard output.",
)
@click.option("--keep", multiple=True, metavar="COLUMN", help="Carry a column over; repeatable.")
@click.option(
    "--logits", is_flag=True, help="What the model gives as it is, in place of probabilities."
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    metavar="N",
    help="Rows computed at a time.  [default: as in training's evaluation]",
)
@options.cluster
@options.as_json
def predict(
    model: str,
    data: str,
    output: str,
    keep: tuple[str, ...],
    logits: bool,
    batch: int | None,
    as_json: bool,
) -> int:
    """Predict."""
    if as_json and output == "-":
        raise click.UsageError("--json and -o -: expected one; both print")
    from heterps import report
    from workers.data.output import OutputFile

    began = time.monotonic()
    with models.explained():
        file = OutputFile(output)
        try:
            _predict(model, data, file, Path(output), list(dict.fromkeys(keep)), logits, batch)
        finally:
            file.abandon()
    seconds = time.monotonic() - began
    if as_json:
        options.print_json({"output": output, "rows": file.rows, "seconds": seconds})
        return OK
    told = f"{file.rows:,} rows in {output}, {file.rows / seconds:,.0f} a second"
    report.console(stderr=True).print(told, soft_wrap=True)
    return OK


def _predict(
    model: str,
    data: str,
    file: "OutputFile",
    output: Path,
    keep: list[str],
    logits: bool,
    batch: int | None,
) -> None:
    from workers.data import rows
    from workers.data.errors import DataError
    from workers.model.saved.model import load
    from workers.model.saved.predict import predictor_of

    paths = rows.find(data)
    if any(output.exists() and path.samefile(output) for path in paths):
        raise DataError(data, "--output", str(output), "another file than those that are read")
    with models.folder_of(model) as folder:
        predictor = predictor_of(load(folder))
        encoder = predictor.encoder()
        kept = rows.check(paths, encoder, keep)
        file.check(kept)
        columns = list(dict.fromkeys([*encoder.columns, *keep]))
        blocks = rows.blocks_of_files(paths, columns, encoder)
        parts = rows.in_batches(blocks, encoder, kept, batch or predictor.batch_rows)
        for found in _shown(predictor.run(parts, logits=logits), rows.known_rows(paths)):
            file.write(_table(found.outputs, found.rows.kept, flat=file.text))
        if not file.rows:
            none = predictor.none(encoder, logits=logits)
            file.write(_table(none, kept.empty_table(), flat=file.text))
        file.finish()


def _shown(found: "Iterator[Predicted]", total: int | None) -> "Iterator[Predicted]":
    """The same, with a bar where there is a terminal."""
    from rich.progress import Progress

    from heterps import report

    console = report.console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("predicting", total=total)
        for one in found:
            yield one
            progress.advance(task, len(one.rows.batch))


def _table(outputs: "Mapping[str, Tensor]", kept: "pa.Table", *, flat: bool) -> "pa.Table":
    """What is kept, and the outputs that have rows.

    Raises:
        DataError: two columns would have one name.
    """
    import pyarrow as pa

    from workers.data.errors import DataError
    from workers.data.output import columns_of

    columns = {name: kept.column(name) for name in kept.column_names}
    for output, values in outputs.items():
        if not values.ndim:
            continue  # such as a learned scale
        for name, column in columns_of(output, values.numpy(), flat=flat).items():
            if name in columns:
                expected = "columns that are called otherwise than the model's outputs"
                raise DataError("job", "--keep", name, expected)
            columns[name] = column
    return pa.table(columns)
