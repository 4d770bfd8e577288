"""Trying many values of a job's keys."""

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heterps.commands import named, options
from heterps.commands.own_cluster import (
    Offer,
    interrupt,
    keep_record,
    look_up_weights,
    uninterrupted,
)
from heterps.errors import INTERRUPTED, JOB_FAILED, OK, UnreachableError

if TYPE_CHECKING:
    from rich.console import Console

    from heterps.client.client import Client
    from heterps.home.target import Target
    from heterps.sweep.best import BestModel
    from heterps.sweep.space import Space
    from heterps.sweep.study import Study, Trial
    from protos.job_pb2 import JobSpec

Submit = Callable[["JobSpec", str], None]
Ended = Callable[[str], None]


@click.command()
@options.job_file
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=RANGE|VALUE",
    help="What to try of a key: log:1e-4..1e-1, int:1..8, float:0..0.5, choice:adam,sgd, or one "
    "value for all. May be repeated; lr is train.optimizer.learning_rate.",
)
@click.option(
    "--trials",
    type=click.IntRange(1),
    metavar="N",
    default=20,
    show_default=True,
    help="How many, those of earlier runs of the sweep included.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1),
    metavar="N",
    default=1,
    show_default=True,
    help="So many at once.",
)
@click.option(
    "--study",
    "study_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where trials are kept, and found again.  [default: JOB.study beside JOB.yaml]",
)
@click.option(
    "--metric",
    metavar="[max:|min:]METRIC",
    help="What trials are compared by, of a job without train.validate.",
)
@click.option("--no-pruning", is_flag=True, help="Have every trial train to its end.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where the best model is kept.  [default: that of the study, .best, beside JOB.yaml]",
)
@options.units
@options.emulate
@options.redis_url
@options.cluster
@options.as_json
def sweep(
    job_file: Path,
    assignments: tuple[str, ...],
    trials: int,
    parallel: int,
    study_file: Path | None,
    metric: str | None,
    no_pruning: bool,
    output: Path | None,
    units: int | None,
    emulate: tuple[str, ...],
    redis_url: str | None,
    as_json: bool,
) -> int:
    """Train JOB.yaml with many values of its keys, and keep the best by held-out data.

    Each trial is a job. Values come from Optuna, by what was measured of the trials before.
    With train.validate a trial that most others were better than at the same step ends early.

    The jobs run on the cluster that the options name, or `heterps up` started; where there is
    none, or with --units, --emulate or --redis, on one of its own, as of `heterps train`.

    Ctrl-C cancels the jobs; the same command goes on. The values of the best trial are written
    as a job file, JOB.best.yaml, beside JOB.yaml. With --study both have its name.
    """
    from heterps import report
    from heterps.sweep.best import BestModel
    from heterps.sweep.space import Space, check_free
    from heterps.sweep.study import Study, of_one_process
    from heterps.sweep.sweep import Sweep
    from heterps.sweep.table import trial_line

    signal.signal(signal.SIGTERM, interrupt)
    console = report.console(stderr=as_json)
    space = Space(job_file, assignments)
    aim = space.aim(metric)
    file = study_file or job_file.with_suffix(".study")
    model = BestModel(output or job_file.with_name(f"{file.stem}.best"))
    best_file = job_file.with_name(f"{file.stem}.best.yaml")
    check_free(best_file)
    with ExitStack() as stack:
        stack.enter_context(of_one_process(file))
        study = Study(file, space, aim, pruned=space.can_prune and not no_pruning)
        if space.base.train.validate.every and not space.can_prune and not no_pruning:
            console.print("no trial ends early: train.validate.every is not in steps")
        target = None if units is not None or emulate or redis_url is not None else _standing()
        if target is not None:
            cluster = _there(console, target)
        else:
            offer = Offer.of(space.base, units, emulate)
            cluster = _own(console, offer, redis_url, model)
        client, submit, ended = stack.enter_context(cluster)

        def show(trial: "Trial", job_id: str) -> None:
            console.print(trial_line(aim.name, trial, job_id, study.trials), soft_wrap=True)
            if job_id:
                ended(job_id)

        running = Sweep(
            *(client, study, space, model, submit),
            on_begin=lambda trial, job_id: console.print(
                f"trial {trial.number} begins  ({job_id})", soft_wrap=True
            ),
            on_end=show,
        )
        interrupted = False
        try:
            running.run(trials, parallel)
        except UnreachableError:
            raise  # its jobs go on; the same command takes them up
        except KeyboardInterrupt:
            interrupted = True
            with uninterrupted():
                console.print("\ncancelling …")
                running.cancel()
        except BaseException:
            running.cancel()
            raise
        model.close()
    result = _result(space, study, model, best_file)
    if as_json:
        options.print_json(result)
    else:
        _show(console, space, study, result)
    if interrupted:
        console.print("go on with the same command")
        return INTERRUPTED
    return OK if result["best"] is not None else JOB_FAILED


def _standing() -> "Target | None":
    """The cluster that is named, or found; None where there is none."""
    from heterps.home.target import Target

    target = named.target()
    if target is None:
        with suppress(UnreachableError):
            target = Target.find()
    return target


@contextmanager
def _there(console: "Console", target: "Target") -> "Iterator[tuple[Client, Submit, Ended]]":
    """A cluster that is there, whose scheduler keeps the models."""
    from heterps.client.client import Client

    with Client.of(target) as client:
        client.ping()
        console.print(f"trials on {target}")

        def submit(job: "JobSpec", job_id: str) -> None:
            job.output = ""
            client.submit(job, job_id)

        yield client, submit, lambda job_id: None


@contextmanager
def _own(
    console: "Console", offer: Offer, redis_url: str | None, model: "BestModel"
) -> "Iterator[tuple[Client, Submit, Ended]]":
    """A cluster of the sweep's own, whose jobs read code and leave models on this disk."""
    from chassis import written

    models = model.folder.with_name(f"{model.folder.name}.trials")

    def clear() -> None:
        if written.is_marked(models):  # it may be left of a sweep that was killed
            shutil.rmtree(models, ignore_errors=True)

    clear()
    written.claim(models)
    try:
        with offer.cluster(console, redis_url) as started:
            client = started()
            console.print(f"trials on {offer}")
            offer.tell_absent(console)

            def submit(job: "JobSpec", job_id: str) -> None:
                look_up_weights(job)
                offer.emulate_in(job)
                job.output = str(models)
                client.submit(job, job_id, code=False)

            def ended(job_id: str) -> None:
                keep_record(client, job_id)
                for left in models.glob(f"*{job_id}*"):
                    if left.is_dir():
                        shutil.rmtree(left, ignore_errors=True)

            yield client, submit, ended
    finally:
        clear()


def _result(space: "Space", study: "Study", model: "BestModel", job_file: Path) -> dict[str, Any]:
    """What the sweep came to; the best trial's values are written as a job file."""
    best = study.best
    if best is not None:
        about = f"trial {best.number} of {study.file.name}, {study.aim.name} {best.value!r}"
        space.write(job_file, best.values, about)
    return {
        "study": str(study.file),
        "metric": study.aim.name,
        "direction": "max" if study.aim.greater else "min",
        "trials": [trial.to_json() for trial in study.trials],
        "best": best.to_json() if best is not None else None,
        "job_file": str(job_file) if best is not None else None,
        "model": str(model.folder) if best is not None and model.holds(best) else None,
    }


def _show(console: "Console", space: "Space", study: "Study", result: dict[str, Any]) -> None:
    from heterps import report
    from heterps.sweep.table import trials_table

    found = trials_table(study.aim.name, list(space.parameters), study.trials, study.best)
    report.show(console, found)
    if study.best is None:
        console.print("no trial is complete")
        return
    commands = [(f"heterps train {result['job_file']}", "train with the best values")]
    if result["model"]:
        use = f"python -c \"import heterps; model = heterps.load('{result['model']}')\""
        commands.append((use, "use the best model"))
    else:
        console.print("the model of the best trial is not kept; train it again:", soft_wrap=True)
    console.print(report.next_commands(commands), soft_wrap=True)
