"""A job that is several times as large as a machine's memory, with its experts out of it."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import heterps
from heterps import Client
from heterps.client.records import Job
from tests.cluster import Roles
from tests.jobs import write_workload
from tests.workers.stage.test_memory_limit import inside, machine

pytestmark = pytest.mark.exhaustive

_MODEL = """
from heterps import MoE
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin, self.end = nn.Linear(4, 512), nn.Linear(512, 1)
        self.experts = MoE(512, 64, 1024, k=1, shadow=False, seed=0)

    def forward(self, dense):
        return self.end(self.experts(self.begin(dense))).squeeze(-1)
"""
_JOB = """
name: mixed
model: {{entry: model.py:Net}}
data: {{path: ., train: data.csv, valid: data.csv, label: label, dense: [a, b, c, d]}}
train:
  epochs: 1
  batch_size: 128
  staleness: 0
  seed: 3
  optimizer: {{name: adam, learning_rate: 1.0e-3}}
  loss: mse{offload}
schedule: {{method: exact, resources: resources.yaml, workload: workload.yaml}}
output: {output}
"""
_RESOURCES = """
types: [{name: cpu, price_per_hour: 0.04, limit: 4, memory_bytes: 4.0e+9}]
"""
# Experts are 268 MB, and four times that with gradients under Adam: 4.2 times what they are given.
_EXPERTS_BYTES = 256_000_000
# The node takes some 270 MB, a worker some 240 MB besides experts, and 80 MB to save and to look at
# what it has saved. Pages of files come on top, and go when others need memory.
_BASE_BYTES = 640_000_000


def write(folder: Path, offload: str) -> Path:
    folder.mkdir()
    (folder / "model.py").write_text(_MODEL)
    torch.manual_seed(1)
    rows = torch.randn(768, 4).tolist()
    lines = [",".join(f"{value:.5f}" for value in (*row, sum(row))) for row in rows]
    (folder / "data.csv").write_text("\n".join(["a,b,c,d,label", *lines]) + "\n")
    (folder / "resources.yaml").write_text(_RESOURCES)
    write_workload(folder / "workload.yaml", ("begin", "experts", "end"), {"cpu": 1e-3})
    text = _JOB.format(output=folder / "out", offload=offload)
    (folder / "job.yaml").write_text(text)
    return folder / "job.yaml"


def ended(client: Client, job: Path) -> Job:
    return client.wait(client.submit(job))


def test_a_job_stays_within_what_its_experts_are_given_and_a_base(tmp_path: Path) -> None:
    """The bits are those of the job that has all memory; without `offload` it does not get by."""
    resident = write(tmp_path / "resident", "")
    told = f"\n  offload: {{memory: '{_EXPERTS_BYTES}', path: {tmp_path}/disk}}"
    outside = write(tmp_path / "outside", told)
    outputs = []
    for limit in (0, _EXPERTS_BYTES + _BASE_BYTES):
        with Roles(tmp_path / f"roles-{limit}") as roles, ExitStack() as stack:
            group = stack.enter_context(machine(0, limit)) if limit else None
            scheduler = roles.scheduler()
            with inside(group) if group is not None else ExitStack():
                roles.node(scheduler, "cpu", "--units", "2")
            with Client(scheduler.address) as client:
                done = ended(client, outside if limit else resident)
                assert done.state == "succeeded", done.reason
                outputs.append(done.output)
                if limit:
                    killed = ended(client, resident)
                    assert killed.state == "failed"
                    assert "SIGKILL" in killed.reason, "nobody but the kernel kills here"
            roles.close()  # before the group goes
    expected, found = (dict(heterps.load(output).named_parameters()) for output in outputs)
    assert {*expected} >= {"experts.w1", "experts.w2"}
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].detach().numpy().tobytes() == weight.detach().numpy().tobytes(), name
    assert not [*(tmp_path / "disk").iterdir()]
