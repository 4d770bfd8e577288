"""What staleness costs in quality: the examples' AUC with and without, over seeds.

    python -m bench.staleness [--job flights] [--seeds 5] [--json FILE]

One worker trains each job. The default of `train.staleness` is 1 as long as the mean over the seeds
is within `WITHIN` of that at 0.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.pages import RESULTS, ROOT, machine, versions, write
from heterps import Client, Cluster
from heterps.job.file import load_job
from heterps.job.prepare import prepare
from protos.job_pb2 import JobSpec
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import job_model
from workers.model.module.inputs import inputs_of

JOBS = {"flights": "examples/flights/job.yaml", "kuairand": "examples/kuairand/job.yaml"}
LAGS = (0, 1)
WITHIN = 0.001
METRIC = "test_auc"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", action="append", choices=JOBS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS / "staleness.json")
    arguments = parser.parse_args()
    jobs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Cluster(types={"cpu": 1}) as cluster:
        client = Client(cluster.address)
        for name in arguments.job or JOBS:
            found: dict[int, list[float]] = {lag: [] for lag in LAGS}
            for seed in range(arguments.seeds):
                for lag in LAGS:
                    found[lag].append(_auc(client, name, seed, lag, folder))
                    print(f"{name}, seed {seed}, staleness {lag}: {found[lag][-1]:.5f}", flush=True)
            means = {lag: statistics.mean(aucs) for lag, aucs in found.items()}
            lost = means[0] - means[1]
            print(f"{name}: {means[0]:.5f} without, {means[1]:.5f} with, {lost:+.5f} lost")
            jobs[name] = {"auc": found, "mean": means, "lost": lost, "within": abs(lost) <= WITHIN}
    result = {
        "benchmark": "staleness",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch"),
        "metric": METRIC,
        "jobs": jobs,
    }
    write(arguments.json, json.dumps(result, indent=1) + "\n")
    return 0 if all(job["within"] for job in jobs.values()) else 1


def _auc(client: Client, name: str, seed: int, lag: int, folder: str) -> float:
    job = load_job(ROOT / JOBS[name])
    prepare(job)
    job.data.ClearField("valid")
    job.train.seed, job.train.staleness, job.output = seed, lag, folder
    job.servers.shards, job.servers.durability = 1, "none"
    give_costs(job)
    job_id = client.submit(job)
    status = client.wait(job_id)
    if status.state != "succeeded":
        raise SystemExit(f"{job_id} failed: {status.reason}")
    return float(status.metrics[METRIC])


def give_costs(job: JobSpec) -> None:
    """In place of measured ones: quality does not depend on them, and one worker is enough."""
    kinds = [kind for kind in job.schedule.offered.types if kind.name == "cpu"]
    del job.schedule.offered.types[:]
    job.schedule.offered.types.extend(kinds)
    given = job.schedule.given
    given.name, given.reference_batch, given.samples = job.name, job.train.batch_size, 1e6
    given.ps_type, given.ps_core_s = "cpu", 0.0
    for layer in TracedModel(job_model(job), inputs_of(job.data)).layers:
        cost = given.layers.add(name=layer.name, kind=layer.kind).cost["cpu"]
        cost.compute_s, cost.parallel_sync, cost.memory_bytes = 1e-3, 1.0, 1e6


if __name__ == "__main__":
    sys.exit(main())
