"""Measuring a model's layers, without a cluster."""

import signal
import tempfile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from heterps.commands import options
from heterps.errors import OK, HeterpsError

if TYPE_CHECKING:
    from protos.decision_pb2 import Workload
    from protos.job_pb2 import JobSpec
    from scheduler import Resources

_LIMITS = {"cpu": 64, "cuda": 8}  # of types that come from the catalogue alone


@click.command()
@click.argument("model", metavar="MODEL", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the workload here.")
@click.option(
    "--resources",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Types to give costs for.  [default: those of the job, else the catalogue's]",
)
@click.option(
    "--types", metavar="A,B", help="Types of the catalogue to give costs for, such as cpu,v100."
)
@click.option(
    "--resources-output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the types with the figures used, for `heterps plan`.",
)
@click.option("--batch", type=click.IntRange(2), metavar="N", help="Samples a batch.")
@click.option("--samples", type=click.FloatRange(1), metavar="N", help="Samples to train.")
@options.units
@click.option(
    "--network",
    type=click.FloatRange(0, min_open=True),
    metavar="GBIT",
    help="Bandwidth between hosts, Gbit/s.  [default: what loopback does here]",
)
@click.option("--args", "arguments", metavar="YAML", help="FILE.py:NAME: its keyword arguments.")
@click.option("--slots", type=click.IntRange(0), metavar="N", help="FILE.py:NAME: sparse inputs.")
@click.option("--dense", type=click.IntRange(0), metavar="N", help="FILE.py:NAME: dense inputs.")
@click.option(
    "--ids",
    type=click.IntRange(1),
    metavar="N",
    default=100_000,
    show_default=True,
    help="FILE.py:NAME: distinct keys a slot.",
)
@options.overrides
@options.as_json
@click.option("--catalogue", is_flag=True, help="Show the catalogue, each figure with its source.")
def profile(
    model: str | None,
    output: Path | None,
    resources: Path | None,
    types: str | None,
    resources_output: Path | None,
    batch: int | None,
    samples: float | None,
    units: int | None,
    network: float | None,
    arguments: str | None,
    slots: int | None,
    dense: int | None,
    ids: int,
    overrides: tuple[str, ...],
    as_json: bool,
    catalogue: bool,
) -> int:
    """Measure each layer of MODEL here, and estimate it on types that are not here.

    MODEL is a job file, or FILE.py:NAME, a callable that returns an nn.Module; for that, inputs
    are made up. The workload that comes out is what `heterps plan` takes.
    """
    from heterps import report
    from heterps.profiling.measure import Settings
    from heterps.profiling.measure import profile as run
    from heterps.report.progress import step

    signal.signal(signal.SIGTERM, _interrupt)
    console = report.console(stderr=as_json)
    if catalogue:
        from heterps.report.layers import catalogue_table
        from workers.profiling.catalogue import load_catalogue

        report.show(console, catalogue_table(load_catalogue()))
        return OK
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    if resources is not None and types is not None:
        raise click.UsageError("--resources and --types exclude each other.")
    with tempfile.TemporaryDirectory(prefix="heterps-example-") as folder:
        if _is_bare(model):
            from heterps.profiling.bare import BareModel

            bare = BareModel(model, _arguments(arguments), batch or 1024, slots, dense, ids)
            job = bare.job(Path(folder))
        else:
            _refuse_bare(arguments=arguments, slots=slots, dense=dense)
            job = _job(model, overrides)
        offered = _offered(job, resources, types)
        if not _is_bare(model):
            from heterps.job.prepare import prepare

            with step(console, f"preparing {job.data.path}") as detail:
                prepare(job, detail)
        settings = Settings(
            units=units,
            batch=batch or 0,
            bytes_per_s=(network or 0.0) * 1e9 / 8,
            samples=samples or 0.0,
        )
        with step(console, f"measuring {job.name}") as detail:
            workload = run(job, offered.to_message(), settings, detail)
    _write(workload, output, offered, resources_output)
    if as_json:
        options.print_json(_plain(workload, offered))
    else:
        _show(workload, offered, output, resources_output or resources)
    return OK


def _is_bare(model: str) -> bool:
    file, colon, name = model.rpartition(":")
    return bool(colon and name.isidentifier() and file.endswith(".py"))


def _refuse_bare(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            option = "--args" if name == "arguments" else f"--{name}"
            raise click.UsageError(f"{option} is for FILE.py:NAME; a job file says it itself.")


def _job(model: str, overrides: tuple[str, ...]) -> "JobSpec":
    from heterps.job.file import load_job

    return load_job(model, overrides)


def _arguments(text: str | None) -> dict[str, object]:
    import yaml

    try:
        value = yaml.safe_load(text) if text else {}
    except yaml.YAMLError as error:
        raise click.BadParameter(f"{text!r}: not YAML: {error}", param_hint="--args") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise click.BadParameter(
            f"{text!r}: expected a mapping, such as '{{dim: 8}}'", param_hint="--args"
        )
    return value


def _offered(job: "JobSpec", file: Path | None, types: str | None) -> "Resources":
    from heterps.job.resources import catalogue_resources, load_resources
    from scheduler import Resources
    from workers.profiling.catalogue import load_catalogue

    if file is not None:
        return load_resources(file)
    if types is not None:
        names = [name.strip() for name in types.split(",") if name.strip()]
        if not names:
            raise click.BadParameter(f"{types!r}: expected names", param_hint="--types")
        return catalogue_resources(names, _LIMITS)
    if job.schedule.offered.types:
        return Resources.from_message(job.schedule.offered, job.schedule.resources)
    return catalogue_resources(list(load_catalogue()), _LIMITS)


def _plain(workload: "Workload", offered: "Resources") -> dict[str, object]:
    """The content of a workload file, its types in the order of the resources."""
    from scheduler import Workload as Parsed

    value = Parsed.from_message(workload).to_json()
    for layer in value["layers"]:
        layer["cost"] = {
            kind: layer["cost"][kind] for kind in offered.names if kind in layer["cost"]
        }
    return value


def _write(
    workload: "Workload", output: Path | None, offered: "Resources", resources: Path | None
) -> None:
    for path, value in ((output, _plain(workload, offered)), (resources, offered.to_json())):
        if path is None:
            continue
        if path.suffix.lower() == ".json":
            import json

            text = json.dumps(value, indent=2, allow_nan=False) + "\n"
        else:
            import yaml

            text = yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=100)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise HeterpsError(f"{path}: cannot be written: {error.strerror}") from None


def _show(
    workload: "Workload", offered: "Resources", output: Path | None, resources: Path | None
) -> None:
    from heterps import report
    from heterps.report.layers import layer_table

    console = report.console()
    report.show(
        console,
        layer_table(workload, offered.names),
        f"one batch of {workload.reference_batch:,} on one unit; a, b: the parts of compute and "
        "sync that\nmore units divide; ± relative standard deviation, ×÷ as a factor",
    )
    if output is not None:
        prices = resources or "RESOURCES.yaml"
        plan = f"heterps plan {output} --resources {prices}"
        console.print(report.next_commands([(plan, "where each layer should run")]), soft_wrap=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
