"""A planned job on nodes of two hosts, with real processes: what it obeys, and where it runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.decision_pb2 import Decision, LayerCost
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_INVALID_JOB,
    RUNNING,
    STARTING,
    SUCCEEDED,
    JobRequest,
    JobStatus,
    ListNodesRequest,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.cluster import Roles
from tests.waiting import wait_until

pytest.importorskip("workers.stage")
_MODEL = """
import time
from pathlib import Path

from torch import nn


class Gate:  # training waits after each step, until there is a file
    def __init__(self, file):
        self.file = Path(file)

    def on_step(self, state):
        while not self.file.exists():
            time.sleep(0.05)


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Dropout(0.1) if tied else nn.Identity()
        self.third = nn.Linear(4, 4)
        if tied:
            self.third.weight = self.first.weight
        self.fourth = nn.Linear(4, 4)

    def forward(self, sparse, dense):
        x = self.third(self.second(self.first(dense.expand(-1, 4))))
        return self.fourth(x).mean(-1)
"""
LAYERS = ("first", "second", "third", "fourth")
HERE, THERE = "127.0.0.1", "127.0.0.2"


class Service:
    """A scheduler with a large node on one host, and three small ones on another."""

    def __init__(self, stub: SchedulerStub, directory: Path) -> None:
        self.stub = stub
        self.directory = directory

    def job(self, name: str, tied: bool = False) -> JobSpec:
        spec = JobSpec(name=name, directory=str(self.directory), output="output")
        spec.model.entry = "model.py:Model"
        spec.model.args.update({"tied": tied})
        spec.model.callbacks.append("model.py:Gate")
        spec.model.callback_args["Gate"].update({"file": str(self.directory / name)})
        spec.data.path, spec.data.train, spec.data.label = str(self.directory), "train.csv", "y"
        spec.data.dense.append("x")
        spec.train.epochs, spec.train.batch_size, spec.train.loss = 1, 16, "bce_with_logits"
        spec.train.staleness = 1
        spec.train.optimizer.name, spec.train.optimizer.learning_rate = "sgd", 0.01
        spec.schedule.method, spec.schedule.min_throughput = "exact", 900.0
        for kind in ("cpu", "cpu-large"):
            spec.schedule.offered.types.add(
                name=kind, device="cpu", price_per_hour=1.0, limit=8, memory_bytes=1e9
            )
        given = spec.schedule.given
        given.name, given.reference_batch, given.samples = "given", 100, 1e6
        for layer in LAYERS:
            # 500 samples a second on a unit for the first three, 1,000 for the last.
            seconds = 0.1 if layer == "fourth" else 0.2 / 3
            able = "cpu-large" if layer == "fourth" else "cpu"
            cost = LayerCost(
                compute_s=seconds, parallel_compute=1.0, parallel_sync=1.0, memory_bytes=1.0
            )
            given.layers.add(name=layer, kind="dense", cost={able: cost})
        return spec

    def submit(self, spec: JobSpec) -> str:
        self.stub.Submit(SubmitRequest(job_id=spec.name, job=spec), timeout=20)
        return spec.name

    def get(self, job_id: str) -> JobStatus:
        return self.stub.GetJob(JobRequest(job_id=job_id), timeout=20)

    def end(self, job_id: str) -> JobStatus:
        (self.directory / job_id).touch()
        return list(self.stub.WatchJob(JobRequest(job_id=job_id), timeout=300))[-1]

    def decision(self, job_id: str) -> Decision:
        return self.stub.GetDecision(JobRequest(job_id=job_id), timeout=20)

    def hosts(self, job_id: str) -> dict[str, str]:
        """The host that each of the job's workers is on, by label."""
        nodes = self.stub.ListNodes(ListNodesRequest(), timeout=20).nodes
        return {
            process.label: node.address.rpartition(":")[0]
            for node in nodes
            for process in node.processes
            if process.job_id == job_id and process.role == "stage"
        }


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("placement")
    (directory / "model.py").write_text(_MODEL)
    (directory / ".heterpsignore").write_text("*\n!model.py\n")
    rows = [f"{i % 2},{i % 7}" for i in range(8 * 16)]
    (directory / "train.csv").write_text("\n".join(["y,x", *rows]) + "\n")
    with Roles(directory) as roles:
        scheduler = roles.scheduler()
        roles.node(scheduler, "cpu", "--units", "2", "--bind", f"{HERE}:0")
        for kind in ("cpu", "cpu", "cpu-large"):
            roles.node(scheduler, kind, "--units", "1", "--bind", f"{THERE}:0")
        yield Service(roles.stub(scheduler), directory)


def test_a_stage_is_on_one_host_and_its_neighbour_with_it(service: Service) -> None:
    job = service.submit(service.job("near"))
    wait_until(lambda: service.get(job).state == RUNNING or service.get(job).reason, "it runs")
    decision = service.decision(job)
    assert [(s.type, s.units) for s in decision.stages] == [("cpu", 2), ("cpu-large", 1)]
    kinds = {kind.name: kind for kind in decision.resources.types}
    assert (kinds["cpu"].limit, kinds["cpu"].units_per_host) == (4, 2)
    assert kinds["cpu-large"].units_per_host == 0
    wait_until(lambda: len(service.hosts(job)) == 3, "the nodes have told of their workers")
    assert service.hosts(job) == dict.fromkeys(
        ("stage 0 worker 0", "stage 0 worker 1", "stage 1 worker 0"), THERE
    )
    assert service.end(job).state == SUCCEEDED


def test_a_workload_of_other_layers_is_found_before_anything_starts(service: Service) -> None:
    spec = service.job("other")
    spec.schedule.given.layers[1].name = "sekond"
    ended = service.end(service.submit(spec))
    assert ended.end_reason == END_INVALID_JOB
    assert "schedule.workload: costs of the layers 'first', 'sekond'" in ended.reason


def test_what_the_model_shares_and_sees_whole_is_planned_for(service: Service) -> None:
    spec = service.job("tied", tied=True)
    spec.schedule.min_throughput = 300.0  # one micro-batch a step fills no pipeline
    job = service.submit(spec)
    wait_until(lambda: service.get(job).state in (STARTING, RUNNING), "it is planned")
    decision = service.decision(job)
    service.stub.CancelJob(JobRequest(job_id=job), timeout=20)
    assert [layer.uncut for layer in decision.workload.layers] == [True, True, False, False]
    text = " ".join(decision.reasons)
    assert "'first' to 'third' stay in one stage: 'first' and 'third' share" in text
    assert decision.workload.micro_batches == 1
    assert "A step has 1 micro-batch, whatever the plan" in text
