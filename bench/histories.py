"""What histories are worth: clicks on KuaiRand with attention as in HSTU, and without, over seeds.

    python -m bench.histories [--seeds 10] [--json FILE]

One worker trains each job, of `examples/kuairand/histories.yaml`, on an embedded cluster; the
baseline has the same rows and settings, but no histories. Writes results and docs/histories.md.
"""

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import t

from bench.pages import DOCS, RESULTS, ROOT, machine, measured_on, table, versions, write
from bench.staleness import give_costs
from heterps import Client, Cluster
from heterps.job.file import load_job
from heterps.job.prepare import prepare

JOB = ROOT / "examples/kuairand/histories.yaml"
KINDS = {"with histories": 2, "without": 0}  # layers of attention
METRICS = ("valid_auc", "test_auc", "test_logloss")
LEVEL = 0.95
PAGE = DOCS / "histories.md"
_TEXT = """\
# What histories are worth

Made by `python -m bench.histories` from `bench/results/histories.json`; {on}, {date}.

[The job](../examples/kuairand/README.md#histories) predicts clicks on short videos (KuaiRand-Pure,
two weeks, split by time) from an impression and from the up to 24 that its user was shown before
it, by two layers of pointwise aggregated attention as in HSTU. The baseline has the same rows,
inputs and settings, and no histories. Each was trained for one epoch with {seeds} seeds, which say
how weights begin and in which order samples come.

Means and their {level} confidence intervals over the seeds, by Student's t; the difference is that
of pairs of one seed.

{table}
Intervals are of the seeds alone, for these very rows of test: another sample of users would move
both lines together, by about 0.003 of AUC.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS / "histories.json")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with Cluster(types={"cpu": 1}) as cluster:
        for seed in range(arguments.seeds):
            for kind, layers in KINDS.items():
                found[kind].append(_metrics(cluster.client(), seed, layers))
                print(f"seed {seed}, {kind}: {found[kind][-1]}", flush=True)
    result = {
        "benchmark": "histories",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch", "scipy"),
        "kinds": found,
    }
    write(arguments.json, json.dumps(result, indent=1) + "\n")
    write(arguments.page, page(result))
    return 0


def page(result: Mapping[str, Any]) -> str:
    """The page of a result."""
    kinds = result["kinds"]
    first, second = (kinds[kind] for kind in KINDS)
    lines = [
        [kind, *(_interval([one[metric] for one in kinds[kind]]) for metric in METRICS)]
        for kind in KINDS
    ]
    pairs = list(zip(first, second, strict=True))
    lines.append(
        ["difference", *(_interval([a[m] - b[m] for a, b in pairs], sign=True) for m in METRICS)]
    )
    return _TEXT.format(
        on=measured_on(result["machine"], result["versions"]),
        date=result["date"],
        seeds=len(first),
        level=f"{LEVEL:.0%}",
        table=table(["", *(metric.replace("_", " ") for metric in METRICS)], lines),
    )


def _interval(values: Sequence[float], *, sign: bool = False) -> str:
    """The mean and the half-width of its confidence interval."""
    mean = statistics.mean(values)
    shown = f"{mean:+.4f}" if sign else f"{mean:.4f}"
    if len(values) < 2:
        return shown
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{shown} ± {t.ppf((1 + LEVEL) / 2, len(values) - 1) * error:.4f}"


def _metrics(client: Client, seed: int, layers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"train.seed": seed, "model.args.layers": layers, "output": folder}
        job = load_job(JOB, settings)
        prepare(job)
        job.servers.shards, job.servers.durability = 1, "none"
        give_costs(job)
        job_id = client.submit(job)
        status = client.wait(job_id)
    if status.state != "succeeded":
        raise SystemExit(f"{job_id} failed: {status.reason}")
    return {metric: status.metrics[metric] for metric in METRICS}


if __name__ == "__main__":
    sys.exit(main())
