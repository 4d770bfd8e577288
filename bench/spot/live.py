"""A job whose spot units are taken away by SIGKILL, on an embedded cluster: bill and prediction.

    python -m bench.spot.live --runs 5

Layers sleep, so that costs are exact. The last stage runs on units at a third of the price; each is
taken away at random instants, some minutes of which stand for hours. What a replacement takes
is measured by a run before, which is not counted, as the scheduler keeps that by type. Results go
to bench/results/spot.json under `live`.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.pages import RESULTS, write
from bench.survive.job import Shape, result_of, write_job
from heterps import Client, Cluster
from heterps.job.file import load_job
from protos.job_pb2 import JobSpec

_UNITS = {"cpu": 1, "front": 2, "spot": 2, "sure": 2}


def main() -> int:
    arguments = _parse()
    shape = Shape(seconds=arguments.seconds, steps=arguments.steps)
    runs: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="heterps-spot-") as folder,
        Cluster(
            Path(folder, "cluster"), _UNITS, list(_UNITS), devices=dict.fromkeys(_UNITS, "cpu")
        ) as cluster,
        Client(cluster.address) as client,
    ):
        for seed in range(arguments.runs + 1):
            spec = _job(Path(folder, str(seed)), shape, arguments)
            run = _run(client, spec, Path(folder, str(seed)), seed, arguments)
            print(json.dumps(run), flush=True)
            runs += [run] if seed else []
    off = [abs(run["paid"] / run["predicted"] - 1) for run in runs]
    path = RESULTS / "spot.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    results["live"] = {"every_s": arguments.every, "most_off": max(off), "runs": runs}
    if not arguments.no_write:
        print(write(path, json.dumps(results, indent=2) + "\n"))
    equal = len({run["digest"] for run in runs}) == 1
    print(f"bills off by {max(off):.1%} at most; {'equal' if equal else 'NOT EQUAL'} to the bit")
    return 0 if equal and max(off) <= 0.05 else 1


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
    types[2] |= {"interruptions_per_hour": 3600 / arguments.every / 2, "recovery_s": 1.0}
    (folder / "workload.json").write_text(json.dumps(work))
    (folder / "resources.json").write_text(json.dumps({"types": types}))
    overrides = {
        "schedule.pin": {n["name"]: "front" for n in work["layers"][:-1]},
        "schedule.min_throughput": 0.55 / shape.seconds,
        "retries": 1000,
        "train.checkpoint.every": "10s",
    }
    return load_job(folder / "job.json", overrides)


def _run(
    client: Client, spec: JobSpec, folder: Path, seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    chance = random.Random(seed)
    job_id = client.submit(spec)
    kills, due = 0, 0.0
    while not (job := client.status(job_id)).state.is_final:
        if job.step and not due:
            due = time.monotonic() + chance.expovariate(1 / arguments.every)
        if due and time.monotonic() > due:
            victims = [
                process.pid
                for node in client.nodes()
                if node.type == "spot"
                for process in node.processes
                if process.job_id == job_id and process.running
            ]
            if victims:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(sorted(victims)), signal.SIGKILL)
                    kills += 1
                due = time.monotonic() + chance.expovariate(1 / arguments.every)
        time.sleep(0.02)
    decision = client.decision_message(job_id)
    status = client.status_message(job_id)
    return {
        "state": job.state.value,
        "reason": status.reason,
        "kills": kills,
        "recoveries": len(status.recoveries),
        "attempts": status.attempt,
        "lost_share": decision.lost_share,
        "predicted": decision.cost,
        "paid": decision.measured.cost,
        "seconds": decision.measured.seconds,
        "digest": result_of(spec, folder / "out" / job_id).digest if status.output else "",
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.spot.live", description=__doc__)
    add = parser.add_argument
    add("--runs", type=int, default=5)
    add("--every", type=float, default=8.0, help="seconds between two interruptions, on average")
    add("--seconds", type=float, default=0.004, help="that a sample takes in a stage")
    add("--steps", type=int, default=400)
    add("--no-write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
