"""Which experts a model's tokens need, and what memory for some of them would do."""

from typing import TYPE_CHECKING

import click

from heterps.commands import models, options
from heterps.errors import OK, ModelUseError

if TYPE_CHECKING:
    from workers.offload.choice.trace import Trace

_PARTS = (8, 4, 2)


@click.group()
def experts() -> None:
    """Experts beyond memory: what a model's tokens need, and what policies make of it."""


@experts.command("trace", help=f"Predict DATA and write which experts it needed. {models.HELP}")
@models.argument
@click.argument("data", metavar="DATA")
@click.option("-o", "--output", default="experts.trace", show_default=True, metavar="FILE")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, metavar="ROWS")
@options.as_json
def trace_command(model: str, data: str, output: str, batch: int, as_json: bool) -> int:
    """Trace."""
    from workers.data import rows
    from workers.model.saved.model import load
    from workers.model.saved.predict import predictor_of
    from workers.offload.choice.trace import read_trace, record
    from workers.offload.experts.layout import ExpertFileError

    with models.explained(), models.folder_of(model) as folder:
        loaded = load(folder)
        predictor = predictor_of(loaded)
        encoder = predictor.encoder()
        paths = rows.find(data)
        kept = rows.check(paths, encoder, [])
        blocks = rows.blocks_of_files(paths, list(encoder.columns), encoder)
        try:
            with record(loaded, output):
                for _ in predictor.run(rows.in_batches(blocks, encoder, kept, batch), logits=True):
                    pass
        except ExpertFileError as error:
            raise ModelUseError(str(error)) from None
    found = read_trace(output)
    if as_json:
        options.print_json({"output": output, "tokens": found.tokens, "calls": len(found.calls)})
        return OK
    click.echo(f"{output}: {found.tokens:,} tokens through {len(found.layers)} layers of experts")
    return OK


@experts.command("replay")
@click.argument("trace", metavar="TRACE", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--memory",
    multiple=True,
    metavar="SIZE",
    help="For experts, such as 2GB; repeatable.  [default: 1/8, 1/4 and 1/2 of all]",
)
@click.option(
    "--batch", type=click.IntRange(1), default=1, show_default=True, help="Forwards taken as one."
)
@options.as_json
def replay_command(trace: str, memory: tuple[str, ...], batch: int, as_json: bool) -> int:
    """Show what each policy would have read of a TRACE, and Belady's, which none can beat."""
    from workers.offload.choice.replay import REPLAYED, replay
    from workers.offload.choice.trace import TraceError, read_trace
    from workers.offload.running.size import bytes_of

    try:
        found = read_trace(trace).in_batches(batch)
        sizes = [bytes_of(one, "--memory") for one in memory]
        slots = [size // found.extent for size in sizes] or _parts(found)
        if min(slots) < 1:
            raise click.UsageError(f"--memory: expected at least {found.extent} bytes, an expert's")
        outcomes = [replay(found, count, policy) for count in slots for policy in REPLAYED]
    except (TraceError, ValueError) as error:
        raise ModelUseError(str(error)) from None
    if as_json:
        options.print_json(
            [
                {
                    "policy": one.policy,
                    "slots": one.slots,
                    "hits": one.hits,
                    "misses": one.misses,
                    "bytes_a_token": one.bytes_a_token,
                }
                for one in outcomes
            ]
        )
        return OK
    click.echo(f"{found.tokens:,} tokens, {sum(one.experts for one in found.layers):,} experts")
    click.echo(f"{'slots':>8}  {'policy':<10} {'hit rate':>8}  {'bytes read a token':>18}")
    for one in outcomes:
        click.echo(
            f"{one.slots:>8}  {one.policy:<10} {one.hit_rate:>8.1%}  {one.bytes_a_token:>18,.0f}"
        )
    return OK


def _parts(trace: "Trace") -> list[int]:
    total = sum(one.experts for one in trace.layers)
    return [max(1, total // part) for part in _PARTS]
