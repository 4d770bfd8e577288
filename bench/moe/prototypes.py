"""M6-T's claim at small scale: k top-1 prototypes against top-k and top-1 at equal compute.

    python -m bench.moe.prototypes                # minutes on one core; a run that stopped goes on
    python -m bench.moe.prototypes --steps 2000 --seeds 5 --fresh

M6-T (arXiv 2105.15082) splits E experts into k groups, lets each token take the best of each, and
finds a lower loss than with top-k and with top-1 at equal compute. Here the model of
`examples/moe_lm` is trained, small, on Tiny Shakespeare where it is present and else on the
standard library's sources. Compute is held equal by the capacity, as in the paper: at "1x" an
expert keeps 1.25 T / E tokens whatever k is, so that all arms pass as many rows through their
experts as top-1 does; at "kx" it keeps k times as many, and arms of one k compare.

Results go to bench/results/prototypes.json, the picture to docs/img/prototypes.svg.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.pages import DOCS, RESULTS, ROOT, picture, table, write

sys.path.append(str(ROOT / "examples/moe_lm"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from model import build
from prepare import find_shakespeare, library, windows
from torch import Tensor, nn

from protos.job_pb2 import DenseOptimizer
from workers.learning.losses import loss_function
from workers.learning.optimizers import make_optimizer, make_schedule
from workers.moe.layer import MoE, aux_loss

CONTEXT, GAMMA = 64, 1.25
MODEL = {"vocabulary": 128, "context": CONTEXT, "dim": 64, "layers": 2, "heads": 2}
EXPERTS = {"experts": 16, "hidden": 64}
OPTIMIZER = {
    "name": "adamw",
    "learning_rate": 0.003,
    "weight_decay": 0.1,
    "schedule": "cosine",
    "warmup_steps": 50,
}


@dataclass(frozen=True)
class Arm:
    """One kind of routing; `capacity` is the paper's: 1 or k times top-1's."""

    name: str
    gate: str
    k: int
    capacity: int

    @property
    def options(self) -> dict[str, Any]:
        return {"gate": self.gate, "k": self.k, "capacity_factor": GAMMA * self.capacity / self.k}


ARMS = [
    # One group is Switch's gate: the best expert, weighted by its probability.
    Arm("top-1", "prototype", 1, 1),
    Arm("top-2, 1x", "topk", 2, 1),
    Arm("2 top-1, 1x", "prototype", 2, 1),
    Arm("top-4, 1x", "topk", 4, 1),
    Arm("4 top-1, 1x", "prototype", 4, 1),
    Arm("top-2, 2x", "topk", 2, 2),
    Arm("2 top-1, 2x", "prototype", 2, 2),
    Arm("top-4, 4x", "topk", 4, 4),
    Arm("4 top-1, 4x", "prototype", 4, 4),
]


def main() -> int:
    arguments = _parse()
    torch.set_num_threads(1)
    name, train, valid = _text()
    settings = {
        "text": name,
        "steps": arguments.steps,
        "batch": arguments.batch,
        **MODEL,
        **EXPERTS,
        "gamma": GAMMA,
        "optimizer": OPTIMIZER,
    }
    runs: list[dict[str, Any]] = []
    if arguments.json.is_file() and not arguments.fresh:
        found = json.loads(arguments.json.read_text())
        runs = found["runs"] if found["settings"] == settings else []
    for seed in range(arguments.seeds):
        for arm in ARMS:
            if any((run["arm"], run["seed"]) == (arm.name, seed) for run in runs):
                continue
            run = _train(arm, seed, train, valid, arguments.steps, arguments.batch)
            runs.append(run)
            _save(arguments.json, settings, runs)
            print(f"{arm.name:12} seed {seed}: {run['valid_loss']:.4f}", flush=True)
    summary = _summary(runs)
    print(_table(summary))
    _draw(runs, summary, arguments.picture)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are there")
    parser.add_argument("--json", type=Path, default=RESULTS / "prototypes.json")
    parser.add_argument("--picture", type=Path, default=DOCS / "img/prototypes.svg")
    return parser.parse_args()


def _text() -> tuple[str, Tensor, Tensor]:
    """Name, training text [n] and held-out windows [m, CONTEXT + 1]."""
    try:
        text = find_shakespeare(ROOT / "data/tinyshakespeare")
        cut = len(text) * 9 // 10
        name, train, valid = "tinyshakespeare", text[:cut], text[cut:]
    except RuntimeError:
        name = f"python {platform.python_version()} sources"
        train, valid = library(valid=False).clip(max=127), library(valid=True).clip(max=127)
    held = windows(valid, CONTEXT, CONTEXT)
    return name, torch.from_numpy(train.astype(np.int64)), torch.from_numpy(held.astype(np.int64))


def _train(
    arm: Arm, seed: int, text: Tensor, valid: Tensor, steps: int, batch: int
) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = build(**MODEL, **EXPERTS, **arm.options)
    spec = DenseOptimizer(**OPTIMIZER)
    optimizer = make_optimizer(spec, list(model.parameters()))
    assert optimizer is not None
    rate, loss_of = make_schedule(spec, optimizer, steps), loss_function("next_token")
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    losses, kept, began = [], 0.0, time.process_time()
    for tokens in _batches(text, seed, steps, batch):  # the same for every arm
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        (loss + aux_loss(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rate is not None:
            rate.step()
        losses.append(loss.item())
        kept += sum((1 - m.stats().dropped) * arm.k for m in layers) / len(layers) / steps
    seconds = time.process_time() - began
    return {
        "arm": arm.name,
        "seed": seed,
        "valid_loss": _evaluate(model, valid, batch),
        "train_loss": [round(statistics.fmean(losses[i : i + 20]), 4) for i in range(0, steps, 20)],
        "rows_per_token": round(kept, 4),
        "cpu_seconds": round(seconds, 1),
        "imbalance": round(statistics.fmean(m.stats().imbalance for m in layers), 3),
    }


def _batches(text: Tensor, seed: int, steps: int, batch: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(CONTEXT + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (batch, 1), generator=generator)
        yield text[starts + places]


@torch.no_grad()
def _evaluate(model: nn.Module, valid: Tensor, batch: int) -> float:
    model.eval()
    loss_of = loss_function("next_token")
    total = 0.0
    for tokens in valid.split(batch):  # as in training, so that a capacity drops as much
        total += loss_of(model(tokens[:, :-1]), tokens[:, 1:]).item() * len(tokens)
    return total / len(valid)


def _summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for arm in ARMS:
        own = [run for run in runs if run["arm"] == arm.name]
        if not own:
            continue
        losses = [run["valid_loss"] for run in own]
        rows.append(
            {
                **asdict(arm),
                "seeds": len(own),
                "mean": statistics.fmean(losses),
                "deviation": statistics.stdev(losses) if len(losses) > 1 else None,
                "rows_per_token": statistics.fmean(run["rows_per_token"] for run in own),
                "cpu_seconds": statistics.fmean(run["cpu_seconds"] for run in own),
            }
        )
    return rows


def _table(summary: list[dict[str, Any]]) -> str:
    header = "routing", "validation loss", "deviation", "seeds", "expert rows a token", "CPU s"
    lines = []
    for row in summary:
        deviation = "–" if row["deviation"] is None else f"{row['deviation']:.4f}"
        figures = f"{row['rows_per_token']:.2f}", f"{row['cpu_seconds']:.0f}"
        lines.append((row["name"], f"{row['mean']:.4f}", deviation, str(row["seeds"]), *figures))
    return table(header, lines)


def _save(path: Path, settings: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    content = {
        "settings": settings,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, one thread",
        "torch": torch.__version__,
        "summary": _summary(runs),
        "runs": runs,
    }
    write(path, json.dumps(content, indent=1) + "\n")


def _draw(runs: list[dict[str, Any]], summary: list[dict[str, Any]], path: Path) -> None:
    colours = {"topk": "#3d6fb4", "prototype": "#d1495b"}

    def draw(panels: Sequence[Any]) -> None:
        axes = panels[0]
        for place, row in enumerate(summary):
            colour = "#1f2933" if row["k"] == 1 else colours[row["gate"]]
            losses = [run["valid_loss"] for run in runs if run["arm"] == row["name"]]
            axes.plot([place] * len(losses), losses, "o", color=colour, alpha=0.45, markersize=4)
            axes.plot([place - 0.25, place + 0.25], [row["mean"]] * 2, color=colour, linewidth=2)
        axes.set_xticks(range(len(summary)), [row["name"].replace(", ", "\n") for row in summary])
        axes.set_ylabel("validation loss, nats a byte")

    picture(draw, path, 1, (7.2, 3.2))


if __name__ == "__main__":
    sys.exit(main())
