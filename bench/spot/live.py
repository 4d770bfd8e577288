"""Jobs whose spot units are taken away, with notice and without: bill and prediction.

    python -m bench.spot.live --runs 5

Real processes, each node of one unit. Layers sleep, so that costs are exact. The last stage runs on
two spot units at a third of the price; a third one stands by. Each time either a node of the stage
is killed, with all that runs on it, or it is drained first, and killed when its notice is over; it
is offered again some seconds later. A minute stands for hours, but a notice stays longer than a
drain takes. What a replacement takes is measured by a run before, which is not counted, as the
scheduler keeps that by type. Results go to bench/results/spot.json under `live`.
"""

import argparse
import json
import random
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from bench.pages import RESULTS, write
from bench.survive.job import Shape, result_of, write_job
from heterps import Client
from heterps.client.attempts import trained
from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from tests.machines import Machines, running

_UNITS = {"cpu": 1, "front": 2, "spot": 3, "sure": 2}
_USED = 2  # spot units
_AWAY_S = (1.0, 4.0)


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
        for seed in range(arguments.runs + 1):
            own = Path(folder, str(seed))
            run = _run(machines, client, _job(own, shape, arguments), own, seed, arguments)
            print(json.dumps(run), flush=True)
            runs += [run] if seed else []
    off = [abs(run["paid"] / run["predicted"] - 1) for run in runs]
    path = RESULTS / "spot.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    results["live"] = {
        "every_s": arguments.every,
        "notice_s": arguments.notice,
        "most_off": max(off),
        "runs": runs,
    }
    if not arguments.no_write:
        print(write(path, json.dumps(results, indent=2) + "\n"))
    failed = [run["reason"] for run in runs if run["state"] != "succeeded"]
    equal = len({run["digest"] for run in runs}) == 1
    print(
        f"bills off by {max(off):.1%} at most; {'equal' if equal else 'NOT EQUAL'} to the bit"
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
    job_id = client.submit(spec)
    taken = {"with notice": 0, "without": 0}
    reclaimed: list[Future[None]] = []
    due = 0.0
    with ThreadPoolExecutor(1) as pool:
        while not (job := client.status(job_id)).state.is_final:
            if job.step and not due:
                due = time.monotonic() + chance.expovariate(1 / arguments.every)
            if due and time.monotonic() > due and all(one.done() for one in reclaimed):
                names = {node.node_id for node, _ in running(client, job_id) if node.type == "spot"}
                if len(names) == _USED:
                    how = chance.choice(list(taken))
                    taken[how] += 1
                    notice = arguments.notice if how == "with notice" else 0.0
                    away = chance.uniform(*_AWAY_S)
                    name = chance.choice(sorted(names))
                    reclaimed.append(pool.submit(_reclaim, machines, client, name, notice, away))
                    due = time.monotonic() + chance.expovariate(1 / arguments.every)
            time.sleep(0.02)
    for one in reclaimed:
        one.result()
    decision = client.decision_message(job_id)
    status = client.status_message(job_id)
    spans = trained(job, decision.price_per_hour)
    return {
        "state": job.state.value,
        "reason": status.reason,
        "taken": taken,
        "recoveries_s": [recovery.seconds for recovery in status.recoveries],
        "moves": [MessageToDict(move) for move in status.moves],
        "ended": [attempt.reason for attempt in status.attempts],
        "attempts": status.attempt,
        "lost_share": decision.lost_share,
        "predicted": decision.cost,
        "paid": sum(one.cost for one in spans),
        "seconds": sum(one.seconds for one in spans),
        "digest": result_of(spec, folder / "out" / job_id).digest if status.output else "",
    }


def _reclaim(machines: Machines, client: Client, name: str, notice: float, away: float) -> None:
    """Take a node away, after its notice if it has one, and offer it again."""
    if notice:
        client.drain(name, notice)
        time.sleep(notice)
    machines.kill(name)
    time.sleep(away)
    machines.start(name)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.spot.live", description=__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=5)
    add("--every", type=float, default=25.0, help="seconds between two interruptions, on average")
    add("--notice", type=float, default=10.0, help="seconds, where there is one")
    add("--seconds", type=float, default=0.008, help="that a sample takes in a stage")
    add("--steps", type=int, default=200)
    add("--no-write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
