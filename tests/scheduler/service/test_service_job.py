"""Whole jobs under the scheduler: trained, queued behind each other, cancelled, broken."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.decision_pb2 import LayerCost
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    CANCELLED,
    END_LOST_SHARD,
    END_WORKER_CRASHED,
    FAILED,
    PLANNING,
    PROFILING,
    RUNNING,
    SUCCEEDED,
    JobRequest,
    JobStatus,
    ListNodesRequest,
    LogsRequest,
    ProcessStatus,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler import Decision
from scheduler.replanning.measure import MIN_WINDOWS, Measurement
from scheduler.replanning.replan import propose
from tests.cluster import Roles
from tests.jobs import CLICKS_LAYERS, write_clicks
from tests.rounds import more
from tests.waiting import wait_until

pytest.importorskip("workers.stage")

COST = LayerCost(
    compute_s=1e-3,
    sync_s=1e-6,
    transfer_s=1e-6,
    parallel_compute=0.5,
    parallel_sync=0.5,
    memory_bytes=1e6,
)


class Service:
    """A scheduler with a real CPU node and an emulated GPU node."""

    def __init__(self, stub: SchedulerStub, directory: Path) -> None:
        self.stub = stub
        self.directory = directory

    def job(self, epochs: int = 1, profiled: bool = True, pause_s: float = 0.0) -> JobSpec:
        """A job; costs that are given spare it its profiling, pauses spare the machine."""
        job = JobSpec(name="tiny", directory=str(self.directory), output="output")
        job.model.entry = "model.py:build"
        job.model.args.update({"pause_s": pause_s})
        job.data.path, job.data.train, job.data.label = str(self.directory), "train.csv", "y"
        job.data.valid = "train.csv"
        job.data.dense.append("x")
        job.data.sparse.extend(("a", "b"))
        job.train.epochs, job.train.batch_size, job.train.loss = epochs, 256, "bce_with_logits"
        job.train.optimizer.name, job.train.optimizer.learning_rate = "adam", 0.01
        job.schedule.method = "exact"
        job.schedule.pin.update({"embedding": "cpu", "tower": "v100", "wide": "v100"})
        for name, device, flops in (("cpu", "cpu", 5e10), ("v100", "cuda", 1e13)):
            job.schedule.offered.types.add(
                name=name,
                device=device,
                flops_per_s=flops,
                price_per_hour=1.0,
                limit=4,
                memory_bytes=8e9,
                memory_bandwidth=1e10,
            )
        if not profiled:
            given = job.schedule.given
            given.name, given.reference_batch, given.samples = "tiny", 256, 4000
            for name in CLICKS_LAYERS:
                layer = given.layers.add(name=name, kind="dense")
                for kind in ("cpu", "v100"):
                    layer.cost[kind].CopyFrom(COST)
        return job

    def submit(self, job_id: str, job: JobSpec) -> None:
        self.stub.Submit(SubmitRequest(job_id=job_id, job=job), timeout=10)

    def get(self, job_id: str) -> JobStatus:
        return self.stub.GetJob(JobRequest(job_id=job_id), timeout=10)

    def end(self, job_id: str) -> JobStatus:
        return list(self.stub.WatchJob(JobRequest(job_id=job_id), timeout=120))[-1]

    def processes(self, job_id: str) -> list[ProcessStatus]:
        nodes = self.stub.ListNodes(ListNodesRequest(), timeout=10).nodes
        return [p for n in nodes for p in n.processes if p.running and p.job_id == job_id]

    def wait_until_trains(self, job_id: str) -> None:
        def trains() -> bool:
            status = self.get(job_id)
            assert status.state <= RUNNING, status.reason
            return status.state == RUNNING and status.step > 2

        wait_until(trains)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("job")
    write_clicks(directory, rows=4000)
    with Roles(directory) as roles:
        scheduler = roles.scheduler()
        roles.node(scheduler, "cpu", "--units", "4")
        roles.node(scheduler, "v100", "--emulate")
        yield Service(roles.stub(scheduler), directory)


def test_a_job_is_measured_planned_trained_and_saved(service: Service) -> None:
    service.submit("trains", service.job(epochs=2))
    status = service.end("trains")
    assert (status.state, status.reason) == (SUCCEEDED, "")
    assert status.samples == 2 * 4000  # every row, twice
    assert status.step == status.total_steps > 0
    assert status.metrics["valid_auc"] > 0.5
    assert Path(status.output).is_dir()
    assert 0 < status.submitted_at < status.started_at < status.ended_at
    decision = service.stub.GetDecision(JobRequest(job_id="trains"), timeout=10)
    assert [stage.type for stage in decision.stages] == ["cpu", "v100"]
    assert all(layer.cost["v100"].estimated for layer in decision.workload.layers)
    measured = decision.measured
    assert measured.emulated
    assert measured.throughput == pytest.approx(status.samples / measured.seconds)
    assert measured.cost == pytest.approx(decision.price_per_hour * measured.seconds / 3600)
    assert len(measured.stage_s) == len(decision.stages)
    assert all(busy_s > 0 for busy_s in measured.stage_s)
    assert not service.processes("trains")
    logs = service.stub.Logs(LogsRequest(job_id="trains", follow=True), timeout=20)
    assert "listens on" in "".join(c.text for c in logs if c.process == "shard 0")


def test_a_second_job_waits_for_units_and_cancelling_the_first_frees_them(
    service: Service,
) -> None:
    service.submit("first", service.job(epochs=5000, profiled=False, pause_s=0.05))
    service.submit("second", service.job(profiled=False))
    service.wait_until_trains("first")
    wait_until(lambda: "become free" in service.get("second").reason)
    assert service.get("second").state in (PROFILING, PLANNING)
    assert service.processes("first")
    cancelled = service.stub.CancelJob(JobRequest(job_id="first"), timeout=30)
    assert cancelled.state == CANCELLED
    assert not service.processes("first")
    assert service.end("second").state == SUCCEEDED


@pytest.mark.exhaustive
def test_a_run_is_measured_in_windows_that_outlast_it(service: Service) -> None:
    job = service.job(epochs=5000, profiled=False, pause_s=0.05)
    job.schedule.pin.update({"tower": "cpu"})
    service.submit("measured", job)

    def measured() -> Measurement:
        request = JobRequest(job_id="measured")
        record = service.stub.GetReplan(request, timeout=10)
        return Measurement.from_message(record.measurement)

    service.wait_until_trains("measured")
    wait_until(lambda: measured().pace.counts and measured().busy[0].counts, timeout_s=180.0)
    assert service.stub.CancelJob(JobRequest(job_id="measured"), timeout=30).state == CANCELLED
    found = measured()
    # cpu, and v100 for the last layer, which is emulated: it runs, but tells nothing of a v100
    assert len(found.busy) == 2
    assert all(one.windows >= MIN_WINDOWS for one in (*found.busy, found.pace))
    assert 0 < found.busy[0].seconds < 2 * found.pace.seconds
    request = JobRequest(job_id="measured")
    decision = Decision.from_message(service.stub.GetDecision(request, timeout=10))
    proposal = propose(decision, found)
    assert proposal.proposed.workload is not None
    assert decision.workload is not None
    before, after = decision.workload.layers, proposal.proposed.workload.layers
    ratio = found.busy[0].seconds / decision.stages[0].compute_s
    assert after[0].cost["cpu"].compute_s == pytest.approx(ratio * before[0].cost["cpu"].compute_s)
    assert after[-1].cost == before[-1].cost
    assert any("emulated" in reason for reason in proposal.reasons)


@pytest.mark.parametrize("role", ["shard", *more("stage")])
def test_the_process_that_was_killed_is_named(service: Service, role: str) -> None:
    job_id = f"killed-{role}"
    job = service.job(epochs=5000, profiled=False, pause_s=0.05)
    job.servers.durability = "none"  # with rows kept, its node would start the shard again
    service.submit(job_id, job)
    service.wait_until_trains(job_id)
    victim = next(p for p in service.processes(job_id) if p.role == role)
    os.kill(victim.pid, signal.SIGKILL)
    status = service.end(job_id)
    reason = END_LOST_SHARD if role == "shard" else END_WORKER_CRASHED
    assert (status.state, status.end_reason) == (FAILED, reason)
    assert status.process == victim.label
    first = status.reason.splitlines()[0]
    assert first.startswith(f"{victim.label} (pid {victim.pid} on node cpu-")
    assert "ended by signal 9 (SIGKILL)" in first
    assert len(status.reason.splitlines()) < 40
    assert not service.processes(job_id)
