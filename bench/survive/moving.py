"""How long a running job stands still when it goes over to another plan, and what it then learns.

    python -m bench.survive.moving --jobs 3

Real processes. A job of one worker in each of two stages goes over to 3 and to 2 workers in the
first, and in the second from one type to another that stands for a GPU, as it has another name and
runs on the CPU; then back to where it was. Layers sleep; `stood_still_s` is the longest that the
last stage began nothing for, by the layers' own clock, of which `usual_gap_s` is usual. Losses are
compared with those of a job that has not moved. Sums over other workers round otherwise, which
training makes more of step by step: so jobs are short. Results go to
bench/results/survive_moves.json.
"""

import argparse
import csv
import datetime
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from bench.pages import RESULTS, machine, versions, write
from bench.survive.figures import longest_gap, spread
from bench.survive.job import Shape, result_of, steps_begun, write_job
from chassis.channels import connect
from heterps import Client
from heterps.job.file import load_job
from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import MoveJobRequest
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.machines import Machines

_NODES = {"cpu": 1, "front": 3, "back": 1, "gpu": 1}
# Workers of the first stage, type of the second.
_WAYS = ((3, "back"), (2, "back"), (2, "gpu"), (1, "back"))
_TRAINS = 8  # steps between two moves, at least
_AFTER_S = 3.0
_CALL_S = 20.0
_LOOK_S = 0.05


def main() -> int:
    arguments = _parse()
    shape = Shape(front=1, back=1, seconds=0.004, steps=arguments.steps)
    nodes = {f"{kind}-{n}": (kind, 1) for kind, units in _NODES.items() for n in range(units)}
    with (
        tempfile.TemporaryDirectory(prefix="heterps-moving-") as folder,
        Machines(Path(folder, "cluster"), nodes) as machines,
        Client(machines.address) as client,
    ):
        unmoved = _run(machines, client, Path(folder, "unmoved"), shape, ())
        jobs = [
            _run(machines, client, Path(folder, f"moved-{n}"), shape, _WAYS)
            for n in range(arguments.jobs)
        ]
    expected = np.array(unmoved.pop("losses"))
    for job in jobs:
        job["losses_off"] = float(np.max(np.abs(np.array(job.pop("losses")) / expected - 1)))
    off = max(job["losses_off"] for job in jobs)
    moves = [one for job in jobs for one in job["moves"]]
    stood = [one["stood_still_s"] for one in moves]
    holds = (
        all(not one["failed"] for one in moves)
        and all(job["each_trained_once"] for job in jobs)
        and off <= 1e-5
        and max(stood) <= 2.0
    )
    result = {
        "benchmark": "survive moving",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch"),
        "shape": asdict(shape),
        "holds": holds,
        "stood_still_s": spread(stood),
        "losses_off_most": off,
        "unmoved": unmoved,
        "jobs": jobs,
    }
    if not arguments.no_write:
        print(write(RESULTS / "survive_moves.json", json.dumps(result, indent=1) + "\n"))
    print(json.dumps({k: v for k, v in result.items() if k not in ("jobs", "unmoved")}, indent=1))
    return 0 if holds else 1


def _job(folder: Path, shape: Shape) -> JobSpec:
    write_job(folder, shape)
    work = json.loads((folder / "workload.json").read_text())
    for layer in work["layers"]:
        cost = layer["cost"]
        cost |= {"gpu": cost["back"]} if "back" in cost else {}
    common = {"memory_bytes": 1e12, "device": "cpu", "price_per_hour": 1.0}
    types = [{"name": name, "limit": limit, **common} for name, limit in _NODES.items()]
    (folder / "workload.json").write_text(json.dumps(work))
    (folder / "resources.json").write_text(json.dumps({"types": types}))
    pin = {layer["name"]: min(layer["cost"]) for layer in work["layers"]}
    return load_job(folder / "job.json", {"schedule.min_throughput": 1.0, "schedule.pin": pin})


def _run(
    machines: Machines,
    client: Client,
    folder: Path,
    shape: Shape,
    ways: Sequence[tuple[int, str]],
) -> dict[str, Any]:
    """A job that goes over to some plans, one after the other."""
    spec = _job(folder, shape)
    job_id = client.submit(spec)
    asked: list[str] = []
    due = _TRAINS
    with connect(machines.address) as channel:
        stub = SchedulerStub(channel)
        while not (job := client.status(job_id)).state.is_final:
            if len(asked) < len(ways) and job.step >= due:
                width, kind = ways[len(asked)]
                plan = _plan(client.decision_message(job_id), width, kind)
                stub.MoveJob(MoveJobRequest(job_id=job_id, decision=plan), timeout=_CALL_S)
                asked.append(f"{width} front + 1 {kind}")
                while len(client.status(job_id).moves) < len(asked):
                    time.sleep(_LOOK_S)
                due = client.status(job_id).step + _TRAINS
            time.sleep(_LOOK_S)
    status, begun = client.status_message(job_id), steps_begun(folder)
    model = folder / "out" / job_id
    with (model / "loss.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    trained = result_of(spec, model).trained
    return {
        "state": job.state.value,
        "asked": asked,
        "moves": [
            {
                "before": one.before,
                "after": one.after,
                "failed": one.failed,
                "step": one.step,
                "seconds": one.seconds,
                "stood_still_s": longest_gap(begun, one.at, one.seconds + _AFTER_S),
            }
            for one in status.moves
        ],
        "usual_gap_s": max(b - a for a, b in pairwise(begun)) if not ways else None,
        "each_trained_once": bool((trained == shape.steps / shape.steps_per_epoch).all()),
        "losses": losses,
    }


def _plan(decision: Decision, width: int, kind: str) -> Decision:
    made = Decision()
    made.CopyFrom(decision)
    del made.stages[:]
    made.stages.add(first=0, last=2, type="front", units=width)
    made.stages.add(first=3, last=3, type=kind, units=1)
    return made


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.survive.moving", description=__doc__)
    add = parser.add_argument
    add("--jobs", type=int, default=3)
    add("--steps", type=int, default=108, help="a multiple of nine")
    add("--no-write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
