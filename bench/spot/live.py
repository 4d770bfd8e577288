"""Jobs whose spot units are taken away, with notice and without: bill and prediction.

    python -m bench.spot.live --seeds 1 2 3
    python -m bench.spot.live --seeds 4 5 --add

Real processes, each node of one unit. Layers sleep, so that costs are exact. The last stage runs on
two spot units at a third of the price; a third one stands by. Each time either a node of the stage
is killed, with all that runs on it, or it is drained first, and killed when its notice is over; it
is offered again some seconds later, and no other is taken until workers can be forked there. A
minute stands for hours, but a notice stays longer than a drain takes. What a replacement takes is
measured by a run before, which is not counted, as the scheduler keeps that by type. Results go to
bench/results/spot.json under `live`, with `--add` beside the runs that are there. `stood_still_s`
is the longest that the layers began nothing for after each node was told to go or killed, and
`usual_gap_s` the longest of all other times.
"""

import argparse
import datetime
import json
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from bench.pages import RESULTS, machine, versions, write
from bench.survive.figures import longest_gap
from bench.survive.job import Shape, result_of, steps_begun, write_job
from heterps import Client
from heterps.client.attempts import trained
from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from tests.machines import Machines, running

_UNITS = {"cpu": 1, "front": 2, "spot": 3, "sure": 2}
_USED = 2  # spot units
_AWAY_S = (1.0, 4.0)
_READY_S = 5.0  # until workers can be forked on a node that came
_OFTEN = 5  # times as often in the run that is not counted, which is half as long
_AFTER_S = 12.0  # in which what a node's end costs is looked for


@dataclass(frozen=True, slots=True)
class Taken:
    """A node that was taken away, at Unix times."""

    node: str
    told_at: float  # 0: it was not
    killed_at: float
    back_at: float


def main() -> int:
    arguments = _parse()
    shape = Shape(seconds=arguments.seconds, steps=arguments.steps)
    nodes = {f"{kind}-{n}": (kind, 1) for kind, units in _UNITS.items() for n in range(units)}
    runs: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="heterps-spot-") as folder,
        Machines(Path(folder, "cluster"), nodes) as machines,
        Client(machines.address) as client,
    ):
        for seed in (0, *arguments.seeds):
            own = Path(folder, str(seed))
            one = shape if seed else replace(shape, steps=shape.steps // 2)
            run = _run(machines, client, _job(own, one, arguments), own, seed, arguments)
            print(json.dumps(run), flush=True)
            runs += [run] if seed else []
    settings = {"every_s": arguments.every, "notice_s": arguments.notice} | asdict(shape)
    path = RESULTS / "spot.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    before = results.get("live", {})
    if arguments.add and before.get("settings") == settings:
        runs = [run for run in before["runs"] if run["seed"] not in arguments.seeds] + runs
    off = [abs(run["paid"] / run["predicted"] - 1) for run in runs]
    results["live"] = {
        "settings": settings,
        "machine": machine(),
        "versions": versions("heterps", "torch"),
        "most_off": max(off),
        "runs": sorted(runs, key=lambda run: run["seed"]),
    }
    if not arguments.no_write:
        print(write(path, json.dumps(results, indent=2) + "\n"))
    failed = [run["reason"] for run in runs if run["state"] != "succeeded"]
    equal = len({run["digest"] for run in runs}) == 1
    print(
        f"{len(runs)} runs, bills off by {max(off):.1%} at most; "
        f"{'equal' if equal else 'NOT EQUAL'} to the bit"
        + "".join(f"\nFAILED: {reason}" for reason in failed)
    )
    return 0 if equal and not failed and max(off) <= 0.05 else 1


def _job(folder: Path, shape: Shape, arguments: argparse.Namespace) -> JobSpec:
    write_job(folder, shape)
    work = json.loads((folder / "workload.json").read_text())
    work["samples"] = shape.steps * shape.batch
    head = work["layers"][-1]
    head["cost"] = dict.fromkeys(("spot", "sure"), head["cost"]["back"])
    common = {"memory_bytes": 1e12, "device": "cpu"}
    price = {"cpu": 0.04, "front": 1.0, "spot": 1.0, "sure": 3.0}
    types: list[dict[str, Any]] = [
        {"name": name, "limit": limit, "price_per_hour": price[name], **common}
        for name, limit in _UNITS.items()
    ]
    types[2] |= {"interruptions_per_hour": 3600 / arguments.every / _USED, "recovery_s": 1.0}
    (folder / "workload.json").write_text(json.dumps(work))
    (folder / "resources.json").write_text(json.dumps({"types": types}))
    overrides = {
        "schedule.pin": dict.fromkeys((n["name"] for n in work["layers"]), "front")
        | {head["name"]: "spot"},
        "schedule.min_throughput": 0.55 / shape.seconds,
        "retries": 1000,
        "train.checkpoint.every": "10s",
    }
    return load_job(folder / "job.json", overrides)


def _run(
    machines: Machines,
    client: Client,
    spec: JobSpec,
    folder: Path,
    seed: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    chance = random.Random(seed)
    every_s = arguments.every if seed else arguments.every / _OFTEN
    job_id = client.submit(spec)
    reclaimed: list[Future[Taken]] = []
    due = 0.0
    with ThreadPoolExecutor(1) as pool:
        while not (job := client.status(job_id)).state.is_final:
            now = time.monotonic()
            if job.step and not due:
                due = now + chance.expovariate(1 / every_s)
            if reclaimed and reclaimed[-1].done():
                due = max(due, reclaimed[-1].result().back_at - time.time() + _READY_S + now)
            if due and now > due and all(one.done() for one in reclaimed):
                names = {node.node_id for node, _ in running(client, job_id) if node.type == "spot"}
                if len(names) == _USED:
                    notice = chance.choice([arguments.notice, 0.0])
                    away = chance.uniform(*_AWAY_S)
                    name = chance.choice(sorted(names))
                    reclaimed.append(pool.submit(_reclaim, machines, client, name, notice, away))
                    due = now + chance.expovariate(1 / every_s)
            time.sleep(0.02)
    taken = [one.result() for one in reclaimed]
    decision = client.decision_message(job_id)
    status = client.status_message(job_id)
    spans = trained(job, decision.price_per_hour)
    begun = steps_begun(folder)
    instants = [at for one in taken for at in (one.told_at, one.killed_at) if at]
    return {
        "seed": seed,
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "state": job.state.value,
        "reason": status.reason,
        "taken": [asdict(one) for one in taken],
        "stood_still_s": [longest_gap(begun, at, _AFTER_S) for at in instants],
        "usual_gap_s": _usual_gap(begun, instants),
        "recoveries_s": [recovery.seconds for recovery in status.recoveries],
        "stood_s": [recovery.stood_s for recovery in status.recoveries],
        "moves": [MessageToDict(move) for move in status.moves],
        "ended": [attempt.reason for attempt in status.attempts],
        "attempts": status.attempt,
        "lost_share": decision.lost_share,
        "predicted": decision.cost,
        "paid": sum(one.cost for one in spans),
        "seconds": sum(one.seconds for one in spans),
        "layers_s": begun[-1] - begun[0] if begun else 0.0,
        "digest": result_of(spec, folder / "out" / job_id).digest if status.output else "",
    }


def _usual_gap(begun: Sequence[float], instants: Sequence[float]) -> float:
    """Seconds: the longest between two beginnings that is not near any of some instants."""
    gaps = [
        b - a
        for a, b in pairwise(begun)
        if not any(at - 0.5 < b and a < at + _AFTER_S for at in instants)
    ]
    return max(gaps, default=0.0)


def _reclaim(machines: Machines, client: Client, name: str, notice: float, away: float) -> Taken:
    """Take a node away, after its notice if it has one, and offer it again."""
    told_at = time.time() if notice else 0.0
    if notice:
        client.drain(name, notice)
        time.sleep(notice)
    killed_at = time.time()
    machines.kill(name)
    time.sleep(away)
    machines.start(name)
    return Taken(name, told_at, killed_at, time.time())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.spot.live", description=__doc__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="a run each")
    add("--add", action="store_true", help="to the runs that are there, of the same settings")
    add("--every", type=float, default=25.0, help="seconds between two interruptions, on average")
    add("--notice", type=float, default=10.0, help="seconds, where there is one")
    add("--seconds", type=float, default=0.008, help="that a sample takes in a stage")
    add("--steps", type=int, default=180)
    add("--no-write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
