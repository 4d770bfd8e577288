"""Whether jobs learn what plain PyTorch does: metrics of held-out data, from the same start.

HeterPS trains each job on an embedded cluster, with its rows on a parameter server. Beside it one
process of plain PyTorch trains the model's own modules with `nn.Embedding(sparse=True)` in place
of those rows, `torch.optim` for all weights, losses of `torch.nn.functional`, and metrics of SciPy
or by their formulas. Rows begin as those of the tables do, and batches come in the same order.

    python -m bench.quality [--job heads] [--seeds 3] [--json FILE]
"""

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor, nn
from torch.nn import functional as f

from bench.pages import RESULTS, ROOT, machine, versions, write
from bench.staleness import give_costs
from heterps import Client, Cluster
from heterps.job.file import load_job
from heterps.job.prepare import prepare
from protos.job_pb2 import JobSpec
from ps import LocalTable
from workers.data import Dataset, GlobalBatches
from workers.data.held_out import HeldOut
from workers.data.tensors import tensors_of
from workers.embedding.sparse import SparseEmbedding
from workers.model.code.entry import job_model
from workers.stage.rows.source import evaluation_batches

BATCH = 4096  # of held-out samples
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Compared:
    """A job, and what plain PyTorch makes of it.

    Attributes:
        loss: of the model's outputs and a batch, a mean over its samples.
        measure: of the outputs and labels of a whole split, by name.
        within: how far metrics may be apart.
    """

    file: str
    loss: Callable[[Any, Tensors], Tensor]
    measure: Callable[[Any, Tensors], dict[str, float]]
    within: float


def auc(scores: Tensor, labels: Tensor) -> float:
    """By Mann and Whitney's U."""
    ranks, positive = rankdata(scores.double().numpy()), labels.numpy() == 1
    ones, zeros = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


_OUTCOMES = {"click": "is_click", "long_view": "long_view", "like": "is_like"}


def outcomes_loss(outputs: Tensors, batch: Tensors) -> Tensor:
    losses = [
        f.binary_cross_entropy_with_logits(outputs[head], batch[f"label.{label}"])
        for head, label in _OUTCOMES.items()
    ]
    return torch.stack(losses).sum()


def outcomes(outputs: Tensors, batch: Tensors) -> dict[str, float]:
    return {
        f"{head}_auc": auc(outputs[head], batch[f"label.{label}"])
        for head, label in _OUTCOMES.items()
    }


def minutes_loss(outputs: Tensor, batch: Tensors) -> Tensor:
    return f.mse_loss(outputs, batch["label.label"])


def minutes(outputs: Tensor, batch: Tensors) -> dict[str, float]:
    off = (outputs - batch["label.label"]).double().numpy()
    return {
        "minutes_rmse": float(np.sqrt(np.mean(off**2))),
        "minutes_mae": float(np.abs(off).mean()),
    }


JOBS = {
    "heads": Compared("examples/kuairand/heads.yaml", outcomes_loss, outcomes, 0.001),
    "delay": Compared("examples/flights/delay.yaml", minutes_loss, minutes, 0.05),
}


class PlainRows(nn.Module):
    """The rows of a table for the keys of a job, as PyTorch has them."""

    def __init__(self, layer: SparseEmbedding, keys: np.ndarray) -> None:
        super().__init__()
        table = LocalTable.create(layer.spec.table, **layer.spec.table_options())
        first = torch.from_numpy(table.pull(keys.view(np.uint64), True))
        self.rows = nn.Embedding.from_pretrained(first, freeze=False, sparse=True)
        self.register_buffer("keys", torch.from_numpy(keys), persistent=False)

    def forward(self, keys: Tensor) -> Tensor:
        return self.rows(torch.searchsorted(self.keys, keys))


class Plain:
    """One process of plain PyTorch that trains the model of a job.

    Attributes:
        model: in training its own modules and `nn.Embedding`.
        batches: global ones, as of the job.
    """

    def __init__(self, job: JobSpec, loss: Callable[[Any, Tensors], Tensor]) -> None:
        self._job, self._loss = job, loss
        self.batches = GlobalBatches.of(job, Dataset.of(job, "train"))
        self.model = job_model(job).train()
        keys = distinct_keys(job)
        learners: list[torch.optim.Optimizer] = []
        rows: list[nn.Parameter] = []
        for name, layer in list(self.model.named_children()):
            if not isinstance(layer, SparseEmbedding):
                continue
            if layer.spec.optimizer != "adagrad" or layer.spec.weight_decay:
                raise SystemExit(f"{layer.spec.table}: only Adagrad is written out here")
            plain = PlainRows(layer, keys)
            setattr(self.model, name, plain)
            rows.append(plain.rows.weight)
            learners.append(
                torch.optim.Adagrad(
                    [plain.rows.weight],
                    lr=layer.spec.learning_rate,
                    initial_accumulator_value=layer.spec.initial_accumulator,
                )
            )
        dense = [p for p in self.model.parameters() if all(p is not other for other in rows)]
        learners.append(torch.optim.Adam(dense, lr=job.train.optimizer.learning_rate))
        self._learners = learners

    def train(self, steps: int) -> list[float]:
        """Train; the loss of each step."""
        losses = []
        for step in range(steps):
            tensors = tensors_of(self.batches.read(step))
            loss = self._loss(self.model(tensors["sparse"], tensors["dense"]), tensors)
            loss.backward()
            for learner in self._learners:
                learner.step()
                learner.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def predict(self, split: str) -> tuple[Any, dict[str, Tensor]]:
        """Outputs and labels of a whole split."""
        self.model.eval()
        outputs, labels = [], []
        with torch.no_grad():
            for _, tensors in evaluation_batches(
                HeldOut(self._job), split, BATCH, 0, 1, lambda: False
            ):
                outputs.append(self.model(tensors["sparse"], tensors["dense"]))
                labels.append({n: t for n, t in tensors.items() if n.startswith("label.")})
        whole = joined(outputs) if isinstance(outputs[0], dict) else torch.cat(outputs)
        return whole, joined(labels)


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by name, one behind the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def distinct_keys(job: JobSpec) -> np.ndarray:
    """The keys of all splits, int64 in order."""
    found: list[np.ndarray] = []
    for split in ("train", "valid", "test"):
        for _, tensors in evaluation_batches(HeldOut(job), split, 1 << 16, 0, 1, lambda: False):
            found.append(np.unique(tensors["sparse"].numpy()))
    return np.unique(np.concatenate(found))


def of_mean(plain: Plain, job: JobSpec) -> dict[str, float]:
    """What is measured of the predictor that always says the mean of what is learned."""
    batches = evaluation_batches(HeldOut(job), "train", BATCH, 0, 1, lambda: False)
    labels = torch.cat([tensors["label.label"] for _, tensors in batches]).double()
    _, held_out = plain.predict("test")
    predicted = torch.full_like(held_out["label.label"], float(labels.mean()))
    return minutes(predicted, held_out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", action="append", choices=JOBS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS / "quality.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Cluster(types={"cpu": 1}) as cluster:
        client = Client(cluster.address)
        for name in arguments.job or JOBS:
            compared, rounds = JOBS[name], []
            for seed in range(arguments.seeds):
                job = load_job(ROOT / compared.file, {"train.seed": seed, "output": folder})
                prepare(job)
                plain = Plain(job, compared.loss)
                plain.train(plain.batches.steps)
                ours = _metrics(client, job)
                splits = ("valid", "test")
                theirs = {
                    f"{split}_{metric}": value
                    for split in splits
                    for metric, value in compared.measure(*plain.predict(split)).items()
                }
                rounds.append(
                    {"seed": seed, "plain": theirs, "heterps": {n: ours[n] for n in theirs}}
                )
                print(f"{name}: {json.dumps(rounds[-1])}", flush=True)
            apart = max(_apart(rounds))
            found[name] = {"within": compared.within, "apart": apart, "rounds": rounds}
            if compared.measure is minutes:
                found[name]["mean_predictor"] = of_mean(plain, job)
            print(f"{name}: {apart:.2g} apart at most, expected {compared.within}", flush=True)
    result = {
        "benchmark": "quality",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch", "scipy"),
        "jobs": found,
    }
    write(arguments.json, json.dumps(result, indent=1) + "\n")
    return 0 if all(job["apart"] <= job["within"] for job in found.values()) else 1


def _apart(rounds: list[dict[str, Any]]) -> Iterable[float]:
    for one in rounds:
        yield from (abs(one["heterps"][name] - value) for name, value in one["plain"].items())


def _metrics(client: Client, job: JobSpec) -> Mapping[str, float]:
    given = JobSpec()
    given.CopyFrom(job)
    given.servers.shards, given.servers.durability = 1, "none"
    give_costs(given)
    job_id = client.submit(given)
    status = client.wait(job_id)
    if status.state != "succeeded":
        raise SystemExit(f"{job_id} failed: {status.reason}")
    return status.metrics


if __name__ == "__main__":
    sys.exit(main())
