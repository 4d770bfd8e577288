"""What distribution costs: the flights job on an embedded cluster against plain PyTorch.

Both sides train the same model on the same batches from the same reader: HeterPS with its
scheduler, parameter-server shard and stage workers as separate processes, and one PyTorch
process with `nn.EmbeddingBag(sparse=True)` and Adagrad, on one thread or on every core, whichever
is faster. HeterPS trains at staleness 1, and once more at 0. The sides take turns in one run,
because machines drift; the figures to read are the medians of the rounds' ratios.

    python -m bench.train [--rounds 3] [--steps 0] [--json FILE]
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.pages import RESULTS, ROOT, machine, versions, write
from heterps import Client, Cluster
from heterps.job.file import load_job
from heterps.job.prepare import prepare
from protos.job_pb2 import JobSpec
from workers.data import Dataset, GlobalBatches
from workers.data.tensors import tensors_of
from workers.embedding.sparse import EmbeddingSpec, SparseEmbedding
from workers.learning.losses import loss_function
from workers.learning.optimizers import make_optimizer
from workers.model.code.entry import job_model

ROWS = 1 << 20


class PlainEmbedding(nn.Module):
    """The same look-up in a fixed array: keys wrap around, which spares it a hash table."""

    def __init__(self, spec: EmbeddingSpec) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, spec.dim, mode="sum", sparse=True)
        nn.init.uniform_(self.bag.weight, -spec.scale, spec.scale)
        self.spec = spec

    def forward(self, keys: Tensor) -> Tensor:
        return self.bag(keys.reshape(-1, 1) % ROWS).view(*keys.shape, self.spec.dim)


def train_plain(job: JobSpec, threads: int, device: str = "cpu") -> float:
    """Samples a second of one PyTorch process with so many threads, from its second step on."""
    torch.set_num_threads(threads)
    model = job_model(job).train()
    sparse = []
    for name, child in list(model.named_children()):
        if isinstance(child, SparseEmbedding):
            plain = PlainEmbedding(child.spec)
            setattr(model, name, plain)
            sparse.append(plain)
    model.to(device)
    tables = [p for layer in sparse for p in layer.parameters()]
    dense = [p for p in model.parameters() if all(p is not t for t in tables)]
    rows_optimizer = torch.optim.Adagrad(
        tables, lr=sparse[0].spec.learning_rate, initial_accumulator_value=0.1
    )
    dense_optimizer = make_optimizer(job.train.optimizer, dense)
    assert dense_optimizer is not None
    loss_of = loss_function(job.train.loss)
    auxiliary = [m for m in model.modules() if hasattr(m, "aux_loss")]
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    samples, began = 0, time.perf_counter()
    for step in range(batches.steps):
        batch = batches.read(step)
        tensors = {name: tensor.to(device) for name, tensor in tensors_of(batch).items()}
        loss = loss_of(
            model(tensors["sparse"], tensors["dense"]).reshape(-1), tensors["label.label"]
        )
        loss = loss + sum(m.aux_loss for m in auxiliary)
        loss.backward()
        rows_optimizer.step()
        dense_optimizer.step()
        rows_optimizer.zero_grad()
        dense_optimizer.zero_grad(set_to_none=False)
        if step == 0:  # a device is made ready, memory is taken
            loss.item()
            began = time.perf_counter()
        else:
            samples += len(batch)
    loss.item()  # a device has done what it was given
    return samples / (time.perf_counter() - began)


def train_heterps(client: Client, job: JobSpec) -> tuple[float, dict[str, float]]:
    """Samples a second of the job on the cluster, and its metrics."""
    job_id = client.submit(job)
    status = client.wait(job_id)
    if status.state != "succeeded":
        raise SystemExit(f"{job_id} failed: {status.reason}")
    return client.decision_message(job_id).measured.throughput, dict(status.metrics)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="per round; 0: the whole job")
    parser.add_argument("--job", type=Path, default=ROOT / "examples/flights/job.yaml")
    parser.add_argument("--json", type=Path, default=RESULTS / "train.json")
    arguments = parser.parse_args()
    job = load_job(arguments.job)
    prepare(job)
    job.train.max_steps = arguments.steps
    rounds: list[dict[str, Any]] = []
    metrics: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        job.output = folder
        with Cluster(Path(folder) / "cluster") as cluster:
            client = Client(cluster.address)
            for number in range(1, arguments.rounds + 1):
                plain = max(train_plain(job, t) for t in {1, os.cpu_count() or 1})
                rates = {}
                for staleness in (1, 0) if number % 2 else (0, 1):
                    job.train.staleness = staleness
                    rates[staleness], metrics[staleness] = train_heterps(client, job)
                ours, at_once = rates[1], rates[0]
                rounds.append(
                    {"plain": plain, "heterps": ours, "heterps_at_once": at_once}
                    | {"metrics": metrics[1], "metrics_at_once": metrics[0]}
                )
                print(
                    f"round {number}: plain {plain:,.0f} samples/s, heterps {ours:,.0f} samples/s, "
                    f"ratio {ours / plain:.2f}; at staleness 0 {at_once:,.0f}",
                    flush=True,
                )
    plain = statistics.median(r["plain"] for r in rounds)
    ours = statistics.median(r["heterps"] for r in rounds)
    ratio = statistics.median(r["heterps"] / r["plain"] for r in rounds)
    at_once = statistics.median(r["heterps_at_once"] / r["heterps"] for r in rounds)
    print(f"median:  plain {plain:,.0f}, heterps {ours:,.0f}, ratio {ratio:.2f}")
    print(f"at staleness 0 {at_once:.2f} of the rate at 1")
    result = {
        "benchmark": "train",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch"),
        "job": job.name,
        "batch_size": job.train.batch_size,
        "rounds": rounds,
        "plain_samples_per_s": plain,
        "heterps_samples_per_s": ours,
        "ratio": ratio,
        "at_once": at_once,
    }
    write(arguments.json, json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
