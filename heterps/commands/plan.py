"""Planning without a cluster."""

from pathlib import Path

import click

from heterps.commands import options
from heterps.errors import INFEASIBLE, OK

METHODS = ("ppo", "exact", "greedy", "all-cpu", "all-gpu", "random", "best", "all")


@click.command()
@click.argument("workload", type=click.Path(path_type=Path))
@click.option(
    "--resources",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Types, prices and limits.",
)
@click.option(
    "--min-throughput", type=float, metavar="X", help="Samples a second that must be reached."
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    metavar="METHOD",
    default="ppo",
    show_default=True,
    help=f"One of {', '.join(METHODS)}.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), metavar="N", default=0, show_default=True
)
@click.option("--pin", multiple=True, metavar="LAYER=TYPE", help="Fix a layer's type.")
@options.as_json
def plan(
    workload: Path,
    resources: Path,
    min_throughput: float | None,
    method: str,
    seed: int,
    pin: tuple[str, ...],
    as_json: bool,
) -> int:
    """Decide which layer of WORKLOAD runs on which type, and on how many units.

    Exits with 5 when no plan meets the demands.
    """
    import scheduler

    pins = {}
    for text in pin:
        layer, equals, kind = text.partition("=")
        if not (layer and equals and kind):
            raise click.BadParameter(f"{text!r}: expected LAYER=TYPE", param_hint="--pin")
        pins[layer] = kind
    decision = scheduler.plan(
        scheduler.load_workload(workload),
        scheduler.load_resources(resources),
        min_throughput=min_throughput,
        method=method,
        seed=seed,
        pin=pins or None,
    )
    if as_json:
        options.print_json(decision.to_json())
    else:
        from heterps import report

        report.show(report.console(), report.decision_report(decision))
    return OK if decision.feasible else INFEASIBLE
