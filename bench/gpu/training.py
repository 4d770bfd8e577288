"""Train a job on one GPU worker, or on one that is emulated: `python -m bench.gpu.training`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bench.pages import ROOT
from heterps import Client, Cluster
from heterps.job.file import load_job

_RESOURCES = """types:
  - {name: gpu, price_per_hour: 1.0, limit: 1, memory_bytes: 8.0e9, device: cuda}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="a folder of examples/")
    parser.add_argument("found", type=Path, help="JSON to write")
    parser.add_argument("--emulated", action="store_true")
    options = parser.parse_args()
    # Emulated threads are slow: a batch is small, and there are two.
    steps, batch = (2, 8) if options.emulated else (300, 0)
    with tempfile.TemporaryDirectory() as folder:
        resources = Path(folder) / "resources.yaml"
        resources.write_text(_RESOURCES)
        keys = [
            f"output={folder}/out",
            f"schedule.resources={resources}",
            f"train.max_steps={steps}",
            *([f"train.batch_size={batch}"] if batch else []),
        ]
        job = load_job(ROOT / "examples" / options.job / "job.yaml", keys)
        kinds = {"emulate": ["gpu"]} if options.emulated else {"devices": {"gpu": "cuda"}}
        with (
            Cluster(Path(folder) / "cluster", types={"gpu": 1}, **kinds) as cluster,
            Client(cluster.address) as client,
        ):
            status = client.wait(client.submit(job), timeout=3000)
            measured = client.decision_message(status.job_id).measured
            found = {
                "state": status.state,
                "steps": steps,
                "samples_per_s": measured.throughput,
                "metrics": dict(status.metrics),
            }
            options.found.write_text(json.dumps(found))
            print(status.reason or status.state)
    return int(status.state != "succeeded")


if __name__ == "__main__":
    sys.exit(main())
