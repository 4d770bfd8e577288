"""A job whose experts and their states are several times `train.offload.memory`, beside it without.

    python -m bench.beyond.job WORK [--experts 64] [--steps 12] [--rounds 3] [--over 4]

Both train in turns on clusters of their own, with Adam. A line a round has the rates of all rounds
so far, and whether the weights had the same bits after each. What is kept of experts has their
weights, two states and gradients.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import heterps

WIDTH, HIDDEN, SAMPLES = 512, 1024, 256
_EXPERT = 2 * WIDTH * HIDDEN * 4  # bytes of its weights; of all that is kept of it four times that
_MODEL = """
from heterps import MoE
from torch import nn

class Net(nn.Module):
    def __init__(self, width, experts, hidden):
        super().__init__()
        self.begin, self.end = nn.Linear(4, width), nn.Linear(width, 1)
        self.experts = MoE(width, experts, hidden, k=1, shadow=False, seed=0)

    def forward(self, dense):
        return self.end(self.experts(self.begin(dense))).squeeze(-1)
"""


def write(folder: Path, experts: int, steps: int, memory: int) -> Path:
    """The job's files; `memory` is bytes for experts, 0: all are in it."""
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(_MODEL)
    rows = np.random.default_rng(0).standard_normal((SAMPLES * steps, 5))
    np.savetxt(folder / "data.csv", rows, "%.6f", ",", header="a,b,c,d,label", comments="")
    kind = {"name": "cpu", "price_per_hour": 0.04, "limit": 4, "memory_bytes": 6e10}
    (folder / "resources.yaml").write_text(json.dumps({"types": [kind]}))
    train: dict[str, Any] = {
        "epochs": 1,
        "batch_size": SAMPLES,
        "micro_batches": 1,
        "staleness": 0,
        "seed": 3,
        "linear": "torch",
        "optimizer": {"name": "adam", "learning_rate": 1e-3},
        "loss": "mse",
    }
    if memory:
        train["offload"] = {"memory": str(memory), "path": str(folder / "disk")}
    job = {
        "name": "beyond",
        "model": {
            "entry": "model.py:Net",
            "args": {"width": WIDTH, "experts": experts, "hidden": HIDDEN},
        },
        "data": {
            "path": ".",
            **dict.fromkeys(("train", "valid"), "data.csv"),
            "label": "label",
            "dense": [*"abcd"],
        },
        "train": train,
        "schedule": {"method": "exact", "resources": "resources.yaml"},
        "output": str(folder / "out"),
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def turn(job: Path) -> dict[str, Any]:
    """Train it on a cluster of its own; what the command says."""
    command = [sys.executable, "-m", "heterps", "train", str(job), "--units", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:] or done.stdout[-2000:])
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def same(one: str, other: str) -> bool:
    """Whether two models have the same bits."""
    theirs = dict(heterps.load(other).named_parameters())
    return all(
        weight.detach().numpy().tobytes() == theirs[name].detach().numpy().tobytes()
        for name, weight in heterps.load(one).named_parameters()
    )


def main() -> int:
    """See above; 1 where weights were not the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--over", type=float, default=4.0, help="the experts are so many memories")
    options = parser.parse_args()
    kept = 4 * _EXPERT * options.experts
    memory = int(kept / options.over)
    rates: dict[str, list[float]] = {"resident": [], "outside": []}
    equal = True
    for number in range(options.rounds):
        outputs = []
        for name, allowed in (("resident", 0), ("outside", memory)):
            folder = options.work / f"{name}-{number}"
            job = write(folder, options.experts, options.steps, allowed)
            told = turn(job)
            facts = json.loads((Path(told["output"]) / "model.json").read_text())
            rates[name].append(facts["samples"] / facts["train_seconds"])
            outputs.append(told["output"])
        equal &= same(*outputs)
        for name in rates:
            shutil.rmtree(options.work / f"{name}-{number}")
        print(json.dumps({"kept": kept, "memory": memory, "samples_per_s": rates, "equal": equal}))
    middle = {name: statistics.median(some) for name, some in rates.items()}
    print(f"of the rate in memory: {middle['outside'] / middle['resident']:.0%}")
    return not equal


if __name__ == "__main__":
    sys.exit(main())
