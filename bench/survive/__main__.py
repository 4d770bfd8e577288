"""What kills cost running jobs: workers, shards, nodes, scheduler and Redis die at random instants.

    python -m bench.survive --kills 200 --seed 1
    python -m bench.survive --kills 20 --kinds worker shard
    python -m bench.survive --kills 30 --kinds survivor stopped drained 'two kinds'
    python -m bench.survive --at-once 4 --kinds worker --every 30 --epochs 100
    python -m bench.survive --rivals --every 30 --kills 20 --epochs 600 --checkpoint '200 steps'

Jobs of one shape run one after the other on a cluster of nodes of one unit each, with `--spares` of
each type: first one that nothing happens to, then others, while kills come, until there were
enough. Each is to train every sample once an epoch, and to end with the same weights and rows, to
the bit. The pause before a kill begins when the job trains again after the one before; those that
are to overlap are kinds of their own. Seconds are those of the layers' own clock. With `--at-once`
so many jobs have their workers killed at the same time, each after pauses of its own, beside the
one that nothing happens to; all nodes of a type are one then. `cores_busy` says what all of this
took of the machine. With `--rivals`
workers alone are killed, and the same model is trained by torchrun and Ray Train besides, whose
workers are killed after the same pauses. `process_start_s` is what a process with torch takes to
start, before anything else runs. Results go to bench/results/survive.json, or survive_rivals.json;
with `--add`, another unfailed run and others with kills are put to those that are there.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.pages import RESULTS, machine, versions, write
from bench.survive.figures import Run, figures, lost_steps, runs_of
from bench.survive.job import Shape, firsts_begun, result_of, steps_begun, trained_last, write_job
from bench.survive.kills import KINDS, SETTLED_S, SHARDS, USUAL, Killer, drawn, pause
from bench.survive.rivals import run_rivals
from heterps import Client
from heterps.errors import UnreachableError
from protos.naming import cuts_of
from tests.disks import small_disk
from tests.machines import Machines

_LOOK_S = 0.05
_BEFORE = {"at_once": 0, "spares": 1}  # of files that do not say so
_LAST = 100  # steps, in which no disk is filled
_DISK = 16 << 20  # bytes, where it is to be full for a while


def main() -> int:
    arguments = _parse()
    shape = Shape(
        front=arguments.front,
        back=arguments.back,
        seconds=arguments.seconds,
        steps=arguments.epochs * Shape().steps_per_epoch,
        staleness=arguments.staleness,
    )
    nodes = _nodes(shape, arguments.at_once, arguments.spares)
    before = _before(arguments, shape)
    arguments.process_start_s = _process_start()
    with tempfile.TemporaryDirectory(prefix="heterps-survive-") as folder:
        with Machines(Path(folder, "cluster"), nodes) as machines:
            busy_s, began = _busy_s(), time.monotonic()
            for parts in _parts(arguments, shape, machines, list(nodes), Path(folder)):
                result = _result(arguments, shape, [*before, *parts])
                result["cores_busy"] = (_busy_s() - busy_s) / (time.monotonic() - began)
                _keep(arguments, result)  # whatever becomes of the next one
        if arguments.rivals:
            result |= run_rivals(Path(folder), shape, arguments)
        _keep(arguments, result)
    print(json.dumps({k: v for k, v in result.items() if k != "parts"}, indent=1))
    return 0 if result["holds"] else 1


def _nodes(shape: Shape, jobs: int, spares: int) -> dict[str, tuple[str, int]]:
    """Nodes by name, with their types and units.

    Args:
        jobs: with kills at the same time; 0 for one alone, on nodes of one unit each.
        spares: units of each type of stages that the jobs do not have.
    """
    stages = {"front": shape.front, "back": shape.back}
    if jobs:
        return {f"{SHARDS}-0": ("cpu", jobs + 1)} | {
            kind: (kind, (jobs + 1) * units + spares) for kind, units in stages.items()
        }
    found = {f"{SHARDS}-0": ("cpu", 1)}
    for kind, units in stages.items():
        found |= {f"{kind}-{number}": (kind, 1) for number in range(units + spares)}
    return found


def _busy_s() -> float:
    """Seconds for which all cores of the machine, together, were busy since it started."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def _process_start() -> float:
    """Seconds that a process with torch takes to start and end, in the median of three."""
    took = []
    for _ in range(3):
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        took.append(time.monotonic() - begun)
    return statistics.median(took)


def _result(arguments: argparse.Namespace, shape: Shape, parts: list[list[Run]]) -> dict[str, Any]:
    return {
        "benchmark": "survive",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch", "ray"),
        "seed": arguments.seed,
        "process_start_s": arguments.process_start_s,
        **_same(arguments, shape),
        **figures(parts, shape.front + shape.back),
    }


def _same(arguments: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """What is the same in all parts."""
    return {
        "shape": asdict(shape),
        "checkpoint": arguments.checkpoint,
        "every_s": arguments.every,
        "at_once": arguments.at_once,
        "spares": arguments.spares,
    }


def _before(arguments: argparse.Namespace, shape: Shape) -> list[list[Run]]:
    """The parts that this one is added to.

    Raises:
        SystemExit: they were measured otherwise.
    """
    if not arguments.add:
        return []
    there = json.loads(_file(arguments).read_text())
    same = _same(arguments, shape)
    if {name: there.get(name, _BEFORE.get(name)) for name in same} != same:
        raise SystemExit(f"--add: {_file(arguments)} is of another job, or of other kills")
    return runs_of(there["parts"])


def _file(arguments: argparse.Namespace) -> Path:
    found: Path = arguments.json or RESULTS / (
        "survive_rivals.json" if arguments.rivals else "survive.json"
    )
    return found


def _keep(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    if not arguments.no_write:
        write(_file(arguments), json.dumps(result, indent=1) + "\n")


def _parts(
    arguments: argparse.Namespace,
    shape: Shape,
    machines: Machines,
    nodes: list[str],
    folder: Path,
) -> Iterator[list[list[Run]]]:
    """The parts so far, each time that there is more."""
    if not arguments.at_once:
        runs: list[Run] = []
        for run in _runs(arguments, shape, machines, nodes, folder):
            runs.append(run)
            yield [runs]
        return

    def one(number: int) -> Run:
        chance, most = random.Random(f"{arguments.seed} {number}"), arguments.kills if number else 0
        return _run(arguments, shape, machines, nodes, folder / str(number), most, chance)

    with ThreadPoolExecutor(arguments.at_once + 1) as pool:
        yield [list(pool.map(one, range(arguments.at_once + 1)))]


def _runs(
    arguments: argparse.Namespace,
    shape: Shape,
    machines: Machines,
    nodes: list[str],
    folder: Path,
) -> Iterator[Run]:
    """The unfailed run, then others until there were enough kills, or jobs."""
    yield _run(arguments, shape, machines, nodes, folder / "unfailed", 0)
    kills = number = 0
    while kills < arguments.kills and number != arguments.jobs:
        number += 1
        run = _run(
            *(arguments, shape, machines, nodes, folder / str(number)),
            arguments.kills - kills,
            random.Random(f"{arguments.seed} {number}"),
        )
        kills += len(run.kills)
        print(
            f"job {number}: {len(run.kills)} kills, {kills} in all: {run.state} in "
            f"{run.seconds:.1f} s, {len(run.ended)} attempts ended, "
            f"{len(run.recovered_s)} recoveries",
            flush=True,
        )
        for kill, gap in zip(run.kills, run.gaps, strict=True):
            print(f"  {kill.kind}: {', '.join(kill.victims)}: {gap:.2f} s", flush=True)
        for reason in run.ended:
            print(f"  an attempt ended: {reason}", flush=True)
        yield run


def _run(
    arguments: argparse.Namespace,
    shape: Shape,
    machines: Machines,
    nodes: list[str],
    folder: Path,
    most: int,
    chance: random.Random | None = None,
) -> Run:
    """One job, with at most so many kills."""
    chance = chance or random.Random(0)
    overrides: dict[str, Any] = {"retries": 10_000, "train.checkpoint.every": arguments.checkpoint}
    spec = write_job(folder, shape, **overrides)
    run = Run()
    with ExitStack() as stack, Client(machines.address) as client:
        if "full disk" in arguments.kinds:
            stack.enter_context(small_disk(folder / "out", _DISK))
        job_id = client.submit(spec)
        output = folder / "out" / job_id
        killer = Killer(machines, job_id, nodes, Path(cuts_of(str(output))), chance)
        due: float | None = None
        after = 0.0  # Unix time
        while not (status := _status(client, job_id)) or not status.state.is_final:
            if due is None and trained_last(folder) > after:
                due = time.monotonic() + pause(chance, arguments.every)
            elif due is not None and time.monotonic() > due and len(run.kills) < most:
                kind = drawn(chance, arguments.kinds)
                done = len(steps_begun(folder)) / shape.micro_batches  # those redone, too
                late = shape.steps - done < _LAST
                if kind == "full disk" and late:  # a model cannot be saved there
                    kind = "survivor"
                if (killed := killer.kill(kind)) is not None:
                    run.kills.append(killed)
                due, after = None, time.time() + SETTLED_S
            time.sleep(_LOOK_S)
        killer.settle()
        message = client.status_message(job_id)
        begun = steps_begun(folder)
        run.timed(begun, firsts_begun(folder))
        run.state = status.state.value
        run.ended = [attempt.reason for attempt in message.attempts]
        run.recovered_s = [recovery.seconds for recovery in message.recoveries]
        lost = lost_steps(begun, [(r.at, r.step) for r in message.recoveries], shape.micro_batches)
        run.lost_steps = [n for n, r in zip(lost, message.recoveries, strict=True) if r.back]
        run.redone = len(begun) - shape.steps * shape.micro_batches
        if run.state == "succeeded":
            result = result_of(spec, output)
            run.digest = result.digest
            run.each_trained_once = bool((result.trained == arguments.epochs).all())
        else:
            run.ended.append(message.reason)
    return run


def _status(client: Client, job_id: str) -> Any:
    """How the job stands; None while no scheduler answers."""
    try:
        return client.status(job_id)
    except UnreachableError:
        return None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.survive",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    add = parser.add_argument
    add("--kills", type=int, default=200)
    add("--jobs", type=int, default=None, help="with kills, at most")
    add("--every", type=float, default=5.0, help="seconds between two, on average")
    add("--seed", type=int, default=1)
    add("--kinds", nargs="+", choices=list(KINDS), default=list(USUAL))
    add("--front", type=int, default=2, help="workers of the first stage")
    add("--back", type=int, default=2, help="of the second")
    add("--seconds", type=float, default=0.002, help="that a sample takes in a stage")
    add("--epochs", type=int, default=55, help="of nine steps each")
    add("--staleness", type=int, default=0)
    add("--spares", type=int, default=1, help="nodes of each type that the job does not need")
    add("--at-once", type=int, default=0, help="jobs with kills; each gets --kills at most")
    add("--checkpoint", default="40 steps")
    add("--rivals", action="store_true", help="torchrun and Ray Train beside it")
    add("--json", type=Path, default=None, help="where results go to instead")
    add("--add", action="store_true", help="to the parts that are in that file")
    add("--no-write", action="store_true")
    arguments = parser.parse_args()
    if arguments.rivals or arguments.at_once:
        arguments.kinds = ["worker"]
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
