"""Planning without a cluster."""

from pathlib import Path

import click

from heterps.commands import options
from heterps.errors import INFEASIBLE, OK
from scheduler.methods.names import METHODS


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
    "--finish-by",
    metavar="TIME",
    help="Time for all samples, such as 90m, 2h or 1.5d; a bare number is hours.",
)
@click.option(
    "--max-price", type=float, metavar="X", help="Dollars an hour that no plan may exceed."
)
@click.option(
    "--exclude", multiple=True, metavar="TYPE", help="Run no layer on TYPE. May be repeated."
)
@click.option(
    "--pin", multiple=True, metavar="LAYER=TYPE", help="Fix a layer's type. May be repeated."
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
@click.option(
    "--finetune",
    type=float,
    metavar="SECONDS",
    default=0.0,
    help="Let ppo learn this very problem for so long.",
)
@click.option("--pareto", is_flag=True, help="Also show cost against throughput.")
@click.option(
    "--what-if",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="Compare with the plan that another price, limit or demand would make, such as "
    "v100.price=1.5, t4.limit=32, v100.interruptions=0.1, min-throughput=2e6 or exclude=t4. "
    "May be repeated: all changes at once.",
)
@click.option(
    "--simulate",
    is_flag=True,
    help="Also simulate the plan's steps: with queues, times that vary, interruptions.",
)
@click.option(
    "--export",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the decision with its inputs as JSON, for `heterps inspect --file`.",
)
@options.as_json
def plan(
    workload: Path,
    resources: Path,
    min_throughput: float | None,
    finish_by: str | None,
    max_price: float | None,
    exclude: tuple[str, ...],
    pin: tuple[str, ...],
    method: str,
    seed: int,
    finetune: float,
    pareto: bool,
    changes: tuple[str, ...],
    simulate: bool,
    export: Path | None,
    as_json: bool,
) -> int:
    """Decide which layer of WORKLOAD runs on which type, and on how many units.

    Exits with 5 when no plan meets the demands. With --what-if, the exit code, --export and
    --simulate are of the plan after the change.
    """
    import scheduler
    from heterps.job.resources import load_resources

    pins = options.assignments(pin, "--pin", "LAYER=TYPE")
    questions = options.assignments(changes, "--what-if", "KEY=VALUE, such as v100.price=1.5")
    decision = scheduler.plan(
        scheduler.load_workload(workload),
        load_resources(resources),
        min_throughput=min_throughput,
        method=method,
        seed=seed,
        pin=pins or None,
        exclude=exclude,
        max_price_per_hour=max_price,
        finish_by=finish_by,
        pareto=pareto,
        finetune=finetune,
    )
    comparison = scheduler.what_if(decision, questions, method, finetune) if questions else None
    answer = comparison.after if comparison else decision
    if export is not None:
        answer.export(export)
    simulated = scheduler.forecast(answer, seed) if simulate else None
    if as_json:
        value = (comparison or decision).to_json()
        if simulate:
            value["simulated"] = simulated.to_json() if simulated is not None else None
        options.print_json(value)
    else:
        from heterps import report

        shown = report.decision_report(decision)
        if comparison is not None:
            shown = report.what_if_report(comparison.before, comparison.after)
        below = [report.forecast_report(simulated)] if simulated is not None else []
        report.show(report.console(), shown, *below)
    return OK if answer.feasible else INFEASIBLE
