"""Train a job on one GPU worker, or on one that is emulated: `python -m bench.gpu.training`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bench.pages import ROOT
from bench.train import train_plain
from heterps import Client, Cluster
from heterps.job.file import load_job
from heterps.job.prepare import prepare

# Parameter servers take units of a type of their own, on which no layer may run.
_RESOURCES = """types:
  - {name: cpu, price_per_hour: 0.05, limit: 4, memory_bytes: 8.0e9, device: cpu}
  - {name: gpu, price_per_hour: 1.0, limit: 1, memory_bytes: 8.0e9, device: cuda,
     flops_per_s: 1.0e+13, memory_bandwidth: 1.0e+12}
"""
_DEVICES = {"cpu": "cpu", "gpu": "cuda"}
# Emulated threads are slow: little is trained, and nothing evaluated.
_TINY = {
    "flights": ("train.batch_size=8",),
    "moe_lm": (
        "train.batch_size=8",
        "model.args={vocabulary: 256, context: 64, dim: 16, layers: 1, heads: 2, experts: 4, "
        "hidden: 16, k: 2}",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=_TINY, help="a folder of examples/")
    parser.add_argument("found", type=Path, help="JSON to write")
    parser.add_argument("--emulated", action="store_true")
    options = parser.parse_args()
    steps = 2 if options.emulated else 300
    with tempfile.TemporaryDirectory() as folder:
        resources = Path(folder) / "resources.yaml"
        resources.write_text(_RESOURCES)
        keys = [
            f"output={folder}/out",
            f"schedule.resources={resources}",
            "schedule.exclude=[cpu]",
            f"train.max_steps={steps}",
            *(_TINY[options.job] if options.emulated else ()),
        ]
        job = load_job(ROOT / "examples" / options.job / "job.yaml", keys)
        if options.emulated:
            job.data.ClearField("valid")
            job.data.ClearField("test")
        kinds = {"emulate": ["gpu"]} if options.emulated else {"devices": _DEVICES}
        with (
            Cluster(Path(folder) / "cluster", types={"cpu": 4, "gpu": 1}, **kinds) as cluster,
            Client(cluster.address) as client,
        ):
            status = client.wait(client.submit(job), timeout=3000)
            decision = client.decision_message(status.job_id)
            found = {
                "state": status.state,
                "steps": steps,
                "samples_per_s": decision.measured.steady_throughput
                or decision.measured.throughput,
                "predicted_samples_per_s": decision.throughput,
                "stages": [f"{stage.units} {stage.type}" for stage in decision.stages],
                "metrics": dict(status.metrics),
            }
        if options.job == "flights" and not options.emulated:
            prepare(job)
            found["plain_samples_per_s"] = train_plain(job, 1, "cuda")
        options.found.write_text(json.dumps(found))
        print(status.reason or status.state)
    return int(status.state != "succeeded")


if __name__ == "__main__":
    sys.exit(main())
