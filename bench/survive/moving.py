"""How long a running job stands still when it goes over to another plan, and what it then learns.

    python -m bench.survive.moving --rounds 3

Real processes. A job of one worker in each of two stages goes over to 3 and to 2 workers in the
first, and in the second from one type to another that stands for a GPU: it has another name and
runs on the CPU. Then back, and so on. Layers sleep; `stood_still_s` is the longest that the last
stage began nothing for, by the layers' own clock, of which `usual_gap_s` is usual. Losses are
compared with those of a job that has not moved. Results go to bench/results/survive_moves.json.
"""

import argparse
import csv
import datetime
import json
import os
import tempfile
import time
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
    shape = Shape(front=1, back=1, seconds=0.002, steps=arguments.steps)
    nodes = {f"{kind}-{n}": (kind, 1) for kind, units in _NODES.items() for n in range(units)}
    with (
        tempfile.TemporaryDirectory(prefix="heterps-moving-") as folder,
        Machines(Path(folder, "cluster"), nodes) as machines,
        Client(machines.address) as client,
    ):
        unmoved = _run(machines, client, Path(folder, "unmoved"), shape, 0)
        moved = _run(machines, client, Path(folder, "moved"), shape, arguments.rounds)
    losses = np.array(unmoved.pop("losses")), np.array(moved.pop("losses"))
    off = float(np.max(np.abs(losses[1] / losses[0] - 1)))
    stood = [one["stood_still_s"] for one in moved["moves"]]
    holds = (
        all(not one["failed"] for one in moved["moves"])
        and moved["each_trained_once"]
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
        "moved": moved,
    }
    if not arguments.no_write:
        print(write(RESULTS / "survive_moves.json", json.dumps(result, indent=1) + "\n"))
    print(json.dumps({k: v for k, v in result.items() if k not in ("moved", "unmoved")}, indent=1))
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
    machines: Machines, client: Client, folder: Path, shape: Shape, rounds: int
) -> dict[str, Any]:
    """A job that moves through all ways so often."""
    spec = _job(folder, shape)
    job_id = client.submit(spec)
    asked: list[str] = []
    due = _TRAINS
    with connect(machines.address) as channel:
        stub = SchedulerStub(channel)
        while not (job := client.status(job_id)).state.is_final:
            if len(asked) < rounds * len(_WAYS) and job.step >= due:
                width, kind = _WAYS[len(asked) % len(_WAYS)]
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
        "usual_gap_s": max(b - a for a, b in pairwise(begun)) if not rounds else None,
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
    add("--rounds", type=int, default=3)
    add("--steps", type=int, default=450, help="so many times nine")
    add("--no-write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
