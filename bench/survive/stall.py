"""What checkpoints cost a training while it goes on: at one a minute, of many weights and rows.

    python -m bench.survive.stall --every 10s --steps 600

Real processes: a worker with 100 MB of weights under Adam, and a million rows of 16 floats under
Adam on two shards. A step sleeps besides, as one does that waits for a device. Checkpoints come
more often than once a minute, to have many; each counts as the only one of its minute. Those count
that were begun once all rows were there. `stall_s` is for how long training waited by its own
account, commits of rows held back included. `lost_s` is by the layers' clock, and has the cores
that writing takes from the training, too: how much longer the steps took from a checkpoint's
beginning until it was complete than as many others did in the median. What is held to 2 % is the
former, as the latter is a question of how many cores are idle. Results go to
bench/results/survive_stall.json.
"""

import argparse
import datetime
import json
import os
import shutil
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.pages import RESULTS, machine, versions, write
from bench.survive.figures import spread
from bench.survive.job import CODE, steps_begun
from heterps import Client
from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from ps import LocalTable
from tests.machines import Machines

_KEYS, _DIM = 8, 16  # of a sample, floats of each one's row
_WIDTH = 4900
_MINUTE_S = 60.0
_MOST = 0.02  # of the time
_NODES = {"cpu-0": ("cpu", 1), "front-0": ("front", 1)}


def main() -> int:
    arguments = _parse()
    with (
        tempfile.TemporaryDirectory(prefix="heterps-stall-") as folder,
        Machines(Path(folder, "cluster"), _NODES) as machines,
        Client(machines.address) as client,
    ):
        spec = _job(Path(folder, "job"), arguments)
        job_id = client.submit(spec)
        job = client.wait(job_id)
        begun = steps_begun(Path(folder, "job"))
        model = Path(folder, "job", "out", job_id)
        (table,) = LocalTable.load_checkpoint(model / "tables").values()
        rows = len(table)
        weights = (model / "dense.safetensors").stat().st_size
        all_there = -(-arguments.samples // arguments.batch)
        cuts = [cut for cut in job.cuts if cut.step >= all_there]
    lost = lost_s([(cut.taken_at - cut.seconds, cut.taken_at) for cut in cuts], begun)
    found = [
        {
            "step": cut.step,
            "seconds": cut.seconds,
            "bytes": cut.bytes,
            "stall_s": cut.stall_s,
            "lost_s": of_steps,
        }
        for cut, of_steps in zip(cuts, lost, strict=True)
    ]
    stall, by_steps = spread([cut.stall_s for cut in cuts]), spread(lost)
    holds = bool(cuts) and stall["most"] <= _MOST * _MINUTE_S
    result = {
        "benchmark": "survive stall",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch"),
        "checkpoint": arguments.every,
        "weights_bytes": weights,
        "rows": rows,
        "state": job.state.value,
        "step_s": median(b - a for a, b in pairwise(begun)),
        "holds": holds,
        "stall_s": stall,
        "lost_s": by_steps,
        "of_a_minute": {
            "stall": {name: stall[name] / _MINUTE_S for name in ("median", "most")},
            "lost": {name: by_steps[name] / _MINUTE_S for name in ("median", "most")},
        },
        "cuts": found,
    }
    if not arguments.no_write:
        print(write(RESULTS / "survive_stall.json", json.dumps(result, indent=1) + "\n"))
    print(json.dumps({name: value for name, value in result.items() if name != "cuts"}, indent=1))
    return 0 if holds else 1


def lost_s(windows: Sequence[tuple[float, float]], begun: Sequence[float]) -> list[float]:
    """How much longer the steps took that have a part in each window than as many others.

    Args:
        windows: from when until when, in the clock of `begun`; none overlaps another.
        begun: when each step was, in order.
    """
    within = [(bisect_right(begun, a) - 1, bisect_left(begun, b)) for a, b in windows]
    inside = {number for first, last in within for number in range(max(0, first), last)}
    others = [b - a for number, (a, b) in enumerate(pairwise(begun)) if number not in inside]
    usual = median(others)
    bounds = [(max(0, first), min(last, len(begun) - 1)) for first, last in within]
    return [begun[last] - begun[first] - (last - first) * usual for first, last in bounds]


def _job(folder: Path, arguments: argparse.Namespace) -> JobSpec:
    (folder / "trace").mkdir(parents=True)
    for file in CODE.glob("*.py"):
        shutil.copy(file, folder)
    names = [f"k{number}" for number in range(_KEYS)]
    with (folder / "train.csv").open("w") as file:
        file.write(",".join(["y", *names]) + "\n")
        for sample in range(arguments.samples):
            keys = range(sample * _KEYS, (sample + 1) * _KEYS)
            file.write(",".join(map(str, [sample % 3 // 2, *keys])) + "\n")
    (folder / ".heterpsignore").write_text("*\n!heavy.py\n!sleeping.py\n")
    (folder / "workload.json").write_text(json.dumps(_workload(arguments)))
    common = {"limit": 1, "price_per_hour": 1.0, "memory_bytes": 1e12, "device": "cpu"}
    types = [{"name": name, **common} for name in ("cpu", "front")]
    (folder / "resources.json").write_text(json.dumps({"types": types}))
    job = {
        "name": "stall",
        "model": {
            "entry": "heavy.py:Model",
            "args": {
                "keys": _KEYS,
                "dim": _DIM,
                "width": _WIDTH,
                "seconds": arguments.sleeps / arguments.batch,
                "trace": str(folder / "trace"),
            },
        },
        "data": {"train": "train.csv", "label": "y", "sparse": names},
        "train": {
            "epochs": 1_000_000,
            "max_steps": arguments.steps,
            "batch_size": arguments.batch,
            "micro_batches": 1,
            "loss": "bce_with_logits",
            "optimizer": {"name": "adam", "learning_rate": 0.0001},
            "checkpoint": {"every": arguments.every, "keep": 1000},
        },
        "servers": {"shards": 2},
        "schedule": {
            "method": "exact",
            "workload": "workload.json",
            "resources": "resources.json",
            "min_throughput": 1.0,
        },
        "output": "out",
    }
    (folder / "job.json").write_text(json.dumps(job))
    return load_job(folder / "job.json")


def _workload(arguments: argparse.Namespace) -> dict[str, Any]:
    cost = {"sync_s": 0.0, "transfer_s": 0.0, "parallel_compute": 1.0, "parallel_sync": 1.0}
    priced = {"front": {"compute_s": arguments.sleeps, "memory_bytes": 1e9, **cost}}
    layers = [{"name": name, "kind": "dense", "cost": priced} for name in ("rows", "tower")]
    head = {"name": "stall", "reference_batch": arguments.batch, "samples": 1e6}
    steps = {"batch": arguments.batch, "micro_batches": 1}
    return head | steps | {"ps_type": "cpu", "ps_core_s": 1e-9, "layers": layers}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.survive.stall", description=__doc__)
    add = parser.add_argument
    add("--every", default="10s", help="seconds between two checkpoints")
    add("--steps", type=int, default=600)
    add("--samples", type=int, default=125_000, help="of an epoch, with eight rows each")
    add("--batch", type=int, default=2048)
    add("--sleeps", type=float, default=0.1, help="seconds that a step sleeps")
    add("--no-write", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
