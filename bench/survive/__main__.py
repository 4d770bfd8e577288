"""What kills cost a running job: workers, shards, nodes and schedulers that die at random instants.

    python -m bench.survive --kills 20 --every 5 --seed 1
    python -m bench.survive --front 1 --back 3 --what worker

The same job runs once without and once with kills, on a cluster of its own; their weights and rows
are compared to the bit. Seconds are those of the layers' own clock. Results go to
bench/results/survive.json.
"""

import argparse
import datetime
import json
import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.pages import RESULTS, machine, versions, write
from bench.survive.job import Shape, digest, steps_begun, write_job
from heterps import Client, Cluster

_LOOK_S = 10.0
WHAT = ("worker", "shard")


@dataclass
class Run:
    """What a run came to.

    Attributes:
        seconds: from its first micro-batch to its last.
        gaps_s: after each kill, the longest that the last stage began nothing for.
        recovered_s: of each recovery, by the scheduler's clock.
        redone: micro-batches that were computed more than once.
        ended: why attempts before the last one did.
    """

    state: str
    digest: str
    seconds: float
    attempts: int
    kills: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    redone: int = 0
    ended: list[str] = field(default_factory=list)
    begun: list[float] = field(default_factory=list, repr=False)


def main() -> int:
    arguments = _parse()
    shape = Shape(
        front=arguments.front,
        back=arguments.back,
        seconds=arguments.seconds,
        steps=arguments.steps,
        staleness=arguments.staleness,
    )
    with tempfile.TemporaryDirectory(prefix="heterps-survive-") as folder:
        units = {"cpu": 1, "front": shape.front, "back": shape.back}
        with Cluster(
            Path(folder, "cluster"), units, list(units), devices=dict.fromkeys(units, "cpu")
        ) as cluster:
            unfailed = _run(cluster, Path(folder, "unfailed"), shape, arguments, kills=0)
            print(f"unfailed: {unfailed.seconds:.1f} s", flush=True)
            killed = _run(cluster, Path(folder, "killed"), shape, arguments, arguments.kills)
    equal = killed.digest == unfailed.digest
    goodput = unfailed.seconds / killed.seconds if killed.seconds else 0.0
    print(
        f"{len(killed.kills)} kills in {killed.seconds:.1f} s: {killed.state}, "
        f"{killed.attempts} attempts, {len(killed.recovered_s)} recoveries, "
        f"{'equal to the bit' if equal else 'NOT EQUAL'}, goodput {goodput:.3f}"
    )
    if killed.gaps_s:
        gaps = sorted(killed.gaps_s)
        usual = max(_gaps(unfailed.begun))
        print(
            f"the last stage stood still for {statistics.median(gaps):.2f} s, at most "
            f"{gaps[-1]:.2f} s; without kills {usual:.2f} s at most"
        )
    if not arguments.no_write:
        result = {
            "benchmark": "survive",
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "versions": versions("torch"),
            "shape": asdict(shape),
            "every_s": arguments.every,
            "seed": arguments.seed,
            "equal": equal,
            "goodput": goodput,
            "unfailed": _told(unfailed),
            "killed": _told(killed),
        }
        write(RESULTS / "survive.json", json.dumps(result, indent=1) + "\n")
    return 0 if equal and killed.state == "succeeded" else 1


def _run(
    cluster: Cluster, folder: Path, shape: Shape, arguments: argparse.Namespace, kills: int
) -> Run:
    overrides: dict[str, Any] = {"retries": 10 * kills}
    if kills and arguments.checkpoint:
        overrides["train.checkpoint.every"] = arguments.checkpoint
    spec = write_job(folder, shape, **overrides)
    chance = random.Random(arguments.seed)
    run = Run("", "", 0.0, 0)
    with Client(cluster.address) as client:
        job_id = client.submit(spec)
        when: list[float] = []
        due = None
        while not (job := client.status(job_id)).state.is_final:
            if job.step and due is None:
                due = time.monotonic() + chance.uniform(0.3, 1.7) * arguments.every
            if due is not None and time.monotonic() > due and len(run.kills) < kills:
                victim = _victim(client, job_id, chance, arguments.what)
                if victim is not None:
                    label, pid = victim
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        run.kills.append(label)
                        when.append(time.time())
                        due = time.monotonic() + chance.uniform(0.3, 1.7) * arguments.every
            time.sleep(0.02)
        message = client.status_message(job_id)
    begun = steps_begun(folder)
    run.state, run.attempts = job.state.value, max(1, message.attempt)
    run.begun = begun
    run.seconds = begun[-1] - begun[0] if begun else 0.0
    run.redone = len(begun) - shape.steps * shape.micro_batches
    run.gaps_s = [_longest_gap(begun, t) for t in when]
    run.ended = [attempt.reason for attempt in message.attempts]
    for reason in run.ended:
        print(f"an attempt ended: {reason}")
    run.recovered_s = [recovery.seconds for recovery in message.recoveries]
    if run.state == "succeeded":
        run.digest = digest(spec, folder / "out" / job_id)
    else:
        print(f"{run.state}: {message.reason}")
    return run


def _told(run: Run) -> dict[str, Any]:
    """What of a run is written down."""
    return {key: value for key, value in asdict(run).items() if key != "begun"}


def _gaps(begun: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(begun)]


def _longest_gap(begun: list[float], when: float) -> float:
    """The longest time without a beginning that has a part in the seconds after `when`."""
    near = [t for t in begun if t <= when][-1:] + [t for t in begun if when < t < when + _LOOK_S]
    return max(_gaps(near), default=0.0)


def _victim(
    client: Client, job_id: str, chance: random.Random, what: list[str]
) -> tuple[str, int] | None:
    """A process of the job, and what it is."""
    found = [
        (process.label, process.pid)
        for node in client.nodes()
        for process in node.processes
        if process.job_id == job_id
        and process.running
        and ("shard" if process.label.startswith("shard") else "worker") in what
    ]
    return chance.choice(sorted(found)) if found else None


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench.survive",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    add = parser.add_argument
    add("--kills", type=int, default=20)
    add("--every", type=float, default=5.0, help="seconds between two, on average")
    add("--seed", type=int, default=1)
    add("--what", nargs="+", choices=WHAT, default=list(WHAT))
    add("--front", type=int, default=2, help="workers of the first stage")
    add("--back", type=int, default=2, help="of the second")
    add("--seconds", type=float, default=0.002, help="that a sample takes in a stage")
    add("--steps", type=int, default=400)
    add("--staleness", type=int, default=0)
    add("--checkpoint", default="", help="such as 10s: take cuts")
    add("--no-write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
