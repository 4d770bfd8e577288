"""Whether plans run at the pace that was promised: jobs whose layers sleep, on a real cluster.

    python -m bench.pace --plan 2+5+2+1+2 --micro-batches 24 --staleness 1
    python -m bench.pace                       # 30 drawn plans at staleness 0, and 30 at 1
    python -m bench.pace --examples            # 20 real jobs, one stage of which computes

`--plan` gives the units of each stage; all stages are then equally busy. Of drawn plans a third
has stages and units at random, a third comes from `exact` and a third from `ppo`; they have 1 to 6
stages and 12 units. Before them it is measured what the executor takes besides its layers, as a
profile would: of one worker's time, and at the end of a step of twelve. Plans are priced with that.
A real job is profiled before it runs and again behind it: where the stage that computes takes
another time then, by more than a twentieth, the machine was not the same, and it is run again; so
is any run beside which others had more than 3 % of the processor (`foreign`). The stage that
computes has a core of its own, as by its plan. Where the others lost what they did by waiting for a
core the run is `full`, and says nothing of the plan: it is told, not counted, and another job is
drawn.
What is measured is samples a second in steady steps, by the layers' own clock, over the decision's
throughput less the executor's share. Results go to bench/results/pace.json and pace_examples.json.
With `--within` no run begins after so many seconds; `--go-on` takes the runs that are there already
and does the others.
"""

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.pace.cores import Busy, Cores, Foreign, Waits, is_full
from bench.pace.examples import (
    JOBS,
    Cut,
    Profiled,
    at_costs,
    cut_at_random,
    profiled,
    profiled_anew,
)
from bench.pace.questions import (
    LEAST_S,
    TYPES,
    UNITS,
    Executor,
    Question,
    drawn,
    given,
    micro_batches_of,
)
from bench.pace.sleeping import pace_of, write_job
from bench.pages import RESULTS, machine, versions, write
from heterps import Client, Cluster
from ps import LocalShards
from workers.profiling.crossing import time_crossing

# Steps until a pipeline is steady and caches are warm; flushed steps are all alike.
_WARM, _WARM_FLUSHED = 5, 2
_LEAST_STEPS, _LEAST_FLUSHED = 10, 4  # that are measured
_STAGES = 6  # of a drawn plan, at most
_CUTS, _DRAWN = 5, 15  # of each real job: that count, and at most to find them
_SAME = 0.05  # by how much a stage's time before and after a run may differ
_OURS = 0.03  # of the machine's time that others may have meanwhile
_TRIES = 4  # of a run on a machine that changes
_EXECUTOR_S = 15.0  # for which it is measured what the executor takes
_ALONE = (1, 4)  # micro-batches a step of the worker that is measured alone
_SAMPLES = 64  # of a micro-batch, about as plans have them
METHODS = ("random", "exact", "ppo")
BOUNDS = (0.95, 1.1)  # of measured over promised, where a promise is kept


def main() -> int:
    arguments = _parse()
    earlier = _earlier(arguments)
    until = time.monotonic() + (arguments.within or math.inf)
    results = []
    cores = Cores.of_machine() if arguments.examples else None
    with (
        tempfile.TemporaryDirectory(prefix="heterps-pace-") as folder,
        _cluster(Path(folder, "cluster"), cores) as cluster,
    ):
        client = Client(cluster.address)
        executor = Executor() if arguments.examples else _executor(client, Path(folder))
        print(
            f"the executor takes {executor.each_s * 1e3:.1f} ms of a micro-batch, "
            f"{executor.handling_s * 1e3:.1f} ms for each stage beside its own, "
            f"{executor.step_s * 1e3:.1f} ms of each step, and {executor.end_s * 1e3:.1f} ms at "
            f"the end of one of {UNITS}",
            flush=True,
        )
        if arguments.examples:
            runs = _examples(client, Path(folder), arguments, cores, earlier)
        else:
            asked = enumerate(_questions(arguments, executor))
            runs = (
                earlier.get((question.name, question.staleness))
                or _tried(client, Path(folder, str(number)), question, arguments.seconds)
                for number, question in asked
            )
        whole = True
        for run in runs:
            print(_line(run), flush=True)
            results.append({"on": _on(machine(), _today(), asdict(executor)), **run})
            seen = {_key(each) for each in results}
            left = [each for key, each in earlier.items() if key not in seen]
            _write(arguments.json, [*results, *left])
            if time.monotonic() > until:
                whole = False
                break
    ratios = [run["ratio"] for run in results if not run.get("full")]
    missing = _CUTS * len(arguments.job or JOBS) - len(ratios) if arguments.examples else 0
    kept = sum(BOUNDS[0] <= ratio <= BOUNDS[1] for ratio in ratios)
    print(
        f"{kept} of {len(ratios)} within {BOUNDS[0]} to {BOUNDS[1]}; median "
        f"{statistics.median(ratios or [0.0]):.3f}, least {min(ratios, default=0.0):.3f}, "
        f"most {max(ratios, default=0.0):.3f}"
        + (f"; {missing} jobs too few" if missing else "")
        + ("" if whole else "; the time is over: --go-on")
    )
    return 0 if whole and kept == len(ratios) and not missing else 1


def _today() -> str:
    return datetime.date.today().isoformat()


def _on(machine: dict[str, Any], date: str, executor: dict[str, float]) -> dict[str, Any]:
    """On what a run was: parts of one file may be of several machines and days."""
    return {"processor": machine["processor"], "date": date, "executor": executor}


def _write(path: Path | None, results: list[dict[str, Any]]) -> None:
    if path is None:
        return
    summary = {
        "benchmark": "pace",
        "date": _today(),
        "machine": machine(),
        "versions": versions("torch"),
        "plans": results,
    }
    write(path, json.dumps(summary, indent=1) + "\n")


def _earlier(arguments: argparse.Namespace) -> dict[tuple[str, int], dict[str, Any]]:
    """Runs of an earlier part, by name and staleness."""
    if not (arguments.go_on and arguments.json and arguments.json.exists()):
        return {}
    runs = json.loads(arguments.json.read_text())["plans"]
    return {_key(run): run for run in runs if "error" not in run}


def _key(run: dict[str, Any]) -> tuple[str, int]:
    """The name and staleness of a run."""
    return run["name"], run.get("staleness", -1)  # of one that failed there is none


@contextmanager
def _cluster(folder: Path, cores: Cores | None) -> Iterator[Cluster]:
    """A cluster whose processes keep to the cores that do not compute."""
    own = os.sched_getaffinity(0)
    if cores is not None:
        os.sched_setaffinity(0, cores.others)
    devices = dict.fromkeys(TYPES, "cpu")
    with Cluster(folder, dict.fromkeys(TYPES, UNITS), TYPES, devices=devices) as cluster:
        os.sched_setaffinity(0, own)
        yield cluster


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", action="append", default=[], help="units by stage: 2+5+2+1+2")
    parser.add_argument("--micro-batches", type=int, default=0, help="0: the planner chooses")
    parser.add_argument("--staleness", type=int, default=None, help="default: 0, then 1")
    parser.add_argument("--micro-batch-s", type=float, default=0.06, help="of a stage of one unit")
    parser.add_argument("--count", type=int, default=30, help="drawn plans for each staleness")
    parser.add_argument("--examples", action="store_true", help="real jobs instead")
    parser.add_argument("--job", action="append", choices=JOBS, help="only these of the real ones")
    parser.add_argument(
        "--step-s", type=float, default=0.2, help="a real job's step on one core, by its batch"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="to measure for at least")
    parser.add_argument("--within", type=float, default=0.0, help="seconds; 0: until all is run")
    parser.add_argument("--go-on", action="store_true", help="from the results that are there")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    if not arguments.plan and not arguments.job and not arguments.json:
        arguments.json = RESULTS / ("pace_examples.json" if arguments.examples else "pace.json")
    return arguments


def _executor(client: Client, folder: Path) -> Executor:
    """Measure what the executor takes besides layers that sleep."""
    taken = []  # a step, by its micro-batches
    for parts in _ALONE:
        alone = given([1], LEAST_S, parts, 1, size=_SAMPLES)
        run = _alone(client, folder / f"alone-{parts}", alone, _EXECUTOR_S)
        taken.append(alone.batch / run["measured"])
    few, many = _ALONE
    busy_s = max(LEAST_S, (taken[1] - taken[0]) / (many - few))
    step_s = max(0.0, taken[0] - few * busy_s)
    with LocalShards(1) as shards:
        crossing = time_crossing(shards.addresses)
    own = Executor(busy_s - LEAST_S, crossing.handling_s, crossing.seconds, step_s)
    together = given([UNITS], LEAST_S / UNITS, UNITS, 0, replace(own, step_s=0.0), _SAMPLES)
    run = _alone(client, folder / "together", together, _EXECUTOR_S)
    late_s = together.batch / run["measured"] - together.batch / run["promised"]
    return replace(own, end_s=max(0.0, late_s * (1 - together.overhead)))


def _questions(arguments: argparse.Namespace, executor: Executor) -> Iterator[Question]:
    """Plans of layers that sleep."""
    lags = (0, 1) if arguments.staleness is None else (arguments.staleness,)
    for staleness in lags:
        # With staleness a step ends while the next ones compute; else its end is all that it takes.
        own = replace(executor, end_s=0.0) if staleness else replace(executor, step_s=0.0)
        for text in arguments.plan:
            units = [int(part) for part in text.split("+")]
            yield given(units, arguments.micro_batch_s, arguments.micro_batches, staleness, own)
        if arguments.plan:
            continue
        for number in range(arguments.count):
            stages = 1 + number % _STAGES
            method = METHODS[(number + number // _STAGES) % len(METHODS)]
            yield drawn(number, stages, method, staleness, arguments.micro_batches, own)


def _examples(
    client: Client,
    folder: Path,
    arguments: argparse.Namespace,
    cores: Cores | None,
    earlier: dict[tuple[str, int], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Runs of real jobs, as many of each as count."""
    staleness = 1 if arguments.staleness is None else arguments.staleness
    for name in arguments.job or JOBS:
        job, latest, counted = None, None, 0
        for number in range(_DRAWN):
            run = earlier.get((f"{name}-{number}", staleness))
            if run is None:
                job = job or profiled(name, arguments.step_s)
                cut = at_costs(cut_at_random(number, job, staleness), latest or job)
                at = folder / f"{name}-{number}"
                run, latest = _steady(client, at, cut, arguments.seconds, cores)
            yield run
            counted += not run.get("full", False)
            if counted == _CUTS:
                break


def _steady(
    client: Client, folder: Path, cut: Cut, seconds: float, cores: Cores | None
) -> tuple[dict[str, Any], Profiled]:
    """Run a real job until its stage takes the same time before and behind it; the last profile."""
    drifts = []
    for number in range(_TRIES):
        run = _tried(client, folder / str(number), cut, seconds, cores)
        after = at_costs(cut, profiled_anew(cut.of))
        drifts.append(after.computing_s / cut.computing_s)
        run["drifts"] = drifts
        if abs(drifts[-1] - 1) <= _SAME and run.get("foreign", 0.0) <= _OURS:
            break
        cut = after
    return run, after.of


def _alone(client: Client, folder: Path, question: Question, seconds: float) -> dict[str, Any]:
    """Run until the machine is ours alone, a few times at most; the run with least beside it."""
    runs = []
    for number in range(_TRIES):
        runs.append(_run(client, folder / str(number), question, seconds))
        if runs[-1]["foreign"] <= _OURS:
            break
    return min(runs, key=lambda run: float(run["foreign"]))


def _tried(
    client: Client,
    folder: Path,
    question: Question | Cut,
    seconds: float,
    cores: Cores | None = None,
) -> dict[str, Any]:
    """A run, or what it failed of."""
    try:
        if isinstance(question, Cut):
            return _run(client, folder, question, seconds, cores)
        return _alone(client, folder, question, seconds)
    except ValueError as error:
        return {"name": question.name, "ratio": 0.0, "error": str(error)}


def _run(
    client: Client,
    folder: Path,
    question: Question | Cut,
    seconds: float,
    cores: Cores | None = None,
) -> dict[str, Any]:
    """Run the job of a question; what was promised and what it came to."""
    planned = question.decide()
    flushed = question.staleness == 0
    warm = _WARM_FLUSHED if flushed else _WARM
    least = _LEAST_FLUSHED if flushed else _LEAST_STEPS
    measured = max(least, math.ceil(seconds * planned.throughput / question.batch))
    steps = warm + measured + 1
    if isinstance(question, Cut):
        job = question.job(folder, steps, planned, cores.computing if cores else None)
    else:
        job = write_job(folder, question, planned, steps)
    job_id = client.submit(job)
    with Busy(cores.others if cores else ()) as busy, Waits(job_id) as waits, Foreign() as foreign:
        status = client.wait(job_id)
    if status.state != "succeeded":
        raise ValueError(f"{job_id} failed: {status.reason}")
    found = client.decision(job_id)
    if found.assignment != planned.assignment:
        raise ValueError(f"{job_id} was planned anew, on other types")
    micro_batches = micro_batches_of(question, found)
    least = question.batch // micro_batches
    pace = pace_of(folder / "trace", question.batch, steps, warm, least)
    overhead = found.workload.overhead if found.workload is not None else 0.0
    promised = found.throughput * (1 - overhead)
    size = question.batch / micro_batches
    units = [stage.units for stage in found.stages]
    ran = found.measured.stage_s if found.measured is not None else ()
    busy_s = [each * k * size for each, k in zip(ran, units, strict=False)]
    waited = waits.seconds(pace.begun, pace.ended)
    if isinstance(question, Cut):  # that one has a core of its own
        waited[question.computing] = 0.0
    waited_s = [waited.get(stage, 0.0) / pace.steps / micro_batches for stage in range(len(units))]
    full = len(busy_s) == len(units) and is_full(
        size / promised, size / pace.throughput, busy_s, waited_s, units
    )
    others = busy.share(pace.begun, pace.ended)
    return {
        "name": question.name,
        "method": question.method,
        "staleness": question.staleness,
        "batch": question.batch,
        "micro_batches": micro_batches,
        "units": units,
        "micro_batch_s": [stage.compute_s * stage.units * size for stage in found.stages],
        "busy_s": busy_s,
        "waited_s": waited_s,
        "promised": promised,
        "measured": pace.throughput,
        "ratio": pace.throughput / promised,
        "steps": pace.steps,
        "seconds": pace.seconds,
        "load": os.getloadavg()[0],
        "foreign": foreign.share(pace.begun, pace.ended),
        **({"others_busy": others, "full": full} if cores else {}),
    }


def _line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['name']:12} {result['error']}"
    units = "+".join(map(str, result["units"]))
    return (
        f"{result['name']:12} {units:12} staleness {result['staleness']}, "
        f"{result['micro_batches']:2} micro-batches: promised {result['promised']:7.2f}, "
        f"measured {result['measured']:7.2f} samples/s, {result['ratio']:.3f} "
        f"({result['steps']} steps, load {result['load']:.1f}"
        + (f", foreign {result['foreign']:.1%}" if "foreign" in result else "")
        + (f", others {result['others_busy']:.2f}" if "others_busy" in result else "")
        + (" FULL" if result.get("full") else "")
        + "".join(f", {drift:.2f}" for drift in result.get("drifts", []))
        + ")"
    )


if __name__ == "__main__":
    sys.exit(main())
