"""The scheduler as a process, with real nodes and a real Redis."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from chassis.channels import connect
from chassis.process import Child
from protos.decision_pb2 import Layer, LayerCost, Resources, ResourceType, Workload
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    CANCELLED,
    FAILED,
    QUEUED,
    HeartbeatRequest,
    JobRequest,
    JobState,
    JobStatus,
    ListJobsRequest,
    ListNodesRequest,
    LogsRequest,
    NodeStatus,
    PlanRequest,
    ProcessStatus,
    ProgressReport,
    SubmitRequest,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler.runs.blame import Blame, Symptom, explain
from scheduler.state.redis_server import EmbeddedRedis
from tests.cluster import Roles
from tests.pids import alive
from tests.waiting import wait_until


class Cluster(Roles):
    """Schedulers on one Redis, and nodes."""

    def serve(self, *arguments: str) -> tuple[Child, SchedulerStub]:
        child = self.scheduler(*arguments)
        return child, self.stub(child)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One that the test may harm."""
    with (
        EmbeddedRedis(tmp_path / "redis") as redis,
        Cluster(tmp_path / "processes", redis.url) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerStub]:
    """Of a scheduler that no test harms, with a node of two units."""
    with Cluster(tmp_path_factory.mktemp("service")) as running:
        scheduler, stub = running.serve()
        running.node(scheduler, "cpu", "--units", "2")
        yield stub


def given_job(tmp_path: Path, floor: float = 0.0, kinds: tuple[str, ...] = ("cpu",)) -> JobSpec:
    """A job with given costs: 1 ms a sample on one unit."""
    job = JobSpec(name="given", directory=str(tmp_path), output="output")
    job.model.entry = "missing.py:build"
    job.schedule.method = "exact"
    job.schedule.min_throughput = floor
    job.schedule.given.CopyFrom(workload(kinds))
    job.schedule.offered.CopyFrom(resources(kinds))
    return job


def workload(kinds: tuple[str, ...] = ("cpu",)) -> Workload:
    cost = {
        kind: LayerCost(compute_s=0.1, parallel_compute=0.9, memory_bytes=1.0) for kind in kinds
    }
    layers = [Layer(name="only", kind="dense", cost=cost)]
    return Workload(name="given", reference_batch=100, samples=1000, layers=layers)


def resources(kinds: tuple[str, ...] = ("cpu",)) -> Resources:
    return Resources(
        types=[
            ResourceType(name=kind, price_per_hour=1.0, limit=8, memory_bytes=1e9) for kind in kinds
        ]
    )


def ended(stub: SchedulerStub, job_id: str, timeout_s: float = 60.0) -> JobStatus:
    return list(stub.WatchJob(JobRequest(job_id=job_id), timeout=timeout_s))[-1]


def test_concurrent_submits_create_one_job(stub: SchedulerStub, tmp_path: Path) -> None:
    def jobs() -> set[str]:
        return {job.job_id for job in stub.ListJobs(ListJobsRequest(), timeout=5).jobs}

    before = jobs()
    request = SubmitRequest(job_id="same", job=given_job(tmp_path, 0, ("v100",)))
    with ThreadPoolExecutor(24) as pool:
        replies = list(pool.map(lambda _: stub.Submit(request, timeout=10), range(48)))
    assert sum(reply.created for reply in replies) == 1
    assert jobs() - before == {"same"}
    request.job.name = "another"
    with pytest.raises(grpc.RpcError) as raised:
        stub.Submit(request, timeout=5)
    assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS


def test_bad_requests_are_refused_with_what_was_expected(stub: SchedulerStub) -> None:
    many = SubmitRequest(job_id="x")
    many.job.schedule.offered.types.add(name="cpu")
    many.job.servers.shards = 1_000_000_000  # it would work on their list for minutes
    for call, needle in (
        (lambda: stub.Submit(many, timeout=5), "servers.shards: 1000000000; expected at most 1024"),
        (lambda: stub.Submit(SubmitRequest(job_id="../x"), timeout=5), "job_id: '../x'"),
        (lambda: stub.Submit(SubmitRequest(job_id="x"), timeout=5), "offered"),
        (lambda: stub.GetJob(JobRequest(job_id="nobody"), timeout=5), "'nobody': unknown"),
        (lambda: list(stub.WatchJob(JobRequest(job_id="nobody"), timeout=5)), "unknown"),
        (lambda: stub.Heartbeat(HeartbeatRequest(), timeout=5), "expected an id"),
        (lambda: stub.Plan(PlanRequest(), timeout=30), "expected a list"),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert needle in raised.value.details()


def test_plan_runs_in_the_service(stub: SchedulerStub) -> None:
    request = PlanRequest(
        workload=workload(), resources=resources(), min_throughput=3000, method="exact"
    )
    decision = stub.Plan(request, timeout=60)
    assert decision.feasible
    assert [(stage.type, stage.units) for stage in decision.stages] == [("cpu", 4)]


def test_demands_reach_the_service(stub: SchedulerStub) -> None:
    request = PlanRequest(
        workload=workload(),
        resources=resources(),
        method="exact",
        finish_by_hours=1e-3,
        max_price_per_hour=1e-3,
        pin={"only": "cpu"},
        pareto=True,
    )
    request.workload.samples = 3600
    decision = stub.Plan(request, timeout=60)
    assert decision.min_throughput == 1000
    assert not decision.feasible
    assert decision.max_price_per_hour == 1e-3
    assert dict(decision.pin) == {"only": "cpu"}
    assert "max_price_per_hour" in [change.key for change in decision.relaxations]
    request.exclude.append("cpu")
    with pytest.raises(grpc.RpcError, match=r"pin\.only: 'cpu': expected a type that may run it"):
        stub.Plan(request, timeout=60)


def test_queued_jobs_wait_for_their_node_and_can_be_cancelled(
    cluster: Cluster, tmp_path: Path
) -> None:
    scheduler, stub = cluster.serve()
    stub.Submit(SubmitRequest(job_id="gpu", job=given_job(tmp_path, 0, ("v100",))), timeout=5)
    stub.Submit(SubmitRequest(job_id="floor", job=given_job(tmp_path, 1e6)), timeout=5)
    wait_until(lambda: stub.GetJob(JobRequest(job_id="gpu"), timeout=5).reason)
    status = stub.GetJob(JobRequest(job_id="gpu"), timeout=5)
    assert (status.state, status.reason) == (QUEUED, "waits for a node of type v100")
    assert status.job.name == "given"

    cluster.node(scheduler, "cpu", "--units", "2")
    failed = ended(stub, "floor")  # behind the one that waits, but it can run
    assert failed.state == FAILED
    assert "1,818" in failed.reason
    decision = stub.GetDecision(JobRequest(job_id="floor"), timeout=5)
    assert not decision.feasible
    assert decision.resources.types[0].limit == 2

    assert stub.CancelJob(JobRequest(job_id="gpu"), timeout=30).state == CANCELLED
    assert stub.CancelJob(JobRequest(job_id="floor"), timeout=30).state == FAILED
    assert stub.Report(ProgressReport(job_id="gpu"), timeout=5).stop


def test_a_worker_that_cannot_start_fails_the_job_with_its_error(
    stub: SchedulerStub, tmp_path: Path
) -> None:
    pytest.importorskip("ps.server")
    stub.Submit(SubmitRequest(job_id="broken", job=given_job(tmp_path)), timeout=5)
    states = [
        JobState.Name(s.state) for s in stub.WatchJob(JobRequest(job_id="broken"), timeout=90)
    ]
    status = stub.GetJob(JobRequest(job_id="broken"), timeout=5)
    assert states[-1] == "FAILED"
    assert "stage 0 worker 0 ended with exit code 1 before it was ready" in status.reason
    assert "missing.py" in status.reason
    text = "".join(
        chunk.text for chunk in stub.Logs(LogsRequest(job_id="broken", follow=True), timeout=20)
    )
    assert "missing.py" in text
    listed = stub.ListNodes(ListNodesRequest(), timeout=5).nodes
    assert [(n.type, n.units_used) for n in listed] == [("cpu", 0)]
    wait_until(
        lambda: (
            not any(
                p.running for n in stub.ListNodes(ListNodesRequest()).nodes for p in n.processes
            )
        )
    )


def test_cancel_stops_every_process(stub: SchedulerStub, tmp_path: Path) -> None:
    stub.Submit(SubmitRequest(job_id="long", job=given_job(tmp_path)), timeout=5)

    def running() -> list[ProcessStatus]:
        nodes = stub.ListNodes(ListNodesRequest(), timeout=5).nodes
        return [p for n in nodes for p in n.processes if p.running and p.job_id == "long"]

    pids = [p.pid for p in wait_until(running)]
    assert stub.CancelJob(JobRequest(job_id="long"), timeout=30).state == CANCELLED
    assert not any(alive(pid) for pid in pids)


def test_a_killed_node_loses_its_lease_and_leaves_no_orphans(cluster: Cluster) -> None:
    scheduler, stub = cluster.serve("--lease", "2")
    node = cluster.node(scheduler, "cpu", "--units", "1")
    stays = cluster.node(scheduler, "cpu", "--units", "1")
    leaves = cluster.node(scheduler, "cpu", "--units", "1")

    def ids() -> set[str]:
        return {n.node_id for n in stub.ListNodes(ListNodesRequest(), timeout=5).nodes}

    assert len(ids()) == 3
    leaves.stop(5.0)
    assert len(ids()) == 2  # it said goodbye: no lease to wait for
    os.kill(node.pid, signal.SIGKILL)
    assert node.facts["node_id"] in ids()
    wait_until(lambda: ids() == {stays.facts["node_id"]}, "its lease ends", 4.0)


def test_nodes_ride_out_a_scheduler_that_restarts(cluster: Cluster, tmp_path: Path) -> None:
    scheduler, stub = cluster.serve()
    node = cluster.node(scheduler, "cpu", "--units", "1")
    stub.Submit(SubmitRequest(job_id="waits", job=given_job(tmp_path, 0, ("v100",))), timeout=5)
    os.kill(scheduler.pid, signal.SIGKILL)
    scheduler.process.wait()

    again, stub = cluster.serve("--bind", scheduler.address)  # after the dead one's hold
    assert again.address == scheduler.address
    wait_until(
        lambda: (
            [n.node_id for n in stub.ListNodes(ListNodesRequest(), timeout=5).nodes]
            == [node.facts["node_id"]]
        )
    )
    assert stub.GetJob(JobRequest(job_id="waits"), timeout=5).state == QUEUED


def test_processes_of_a_job_nobody_runs_are_stopped(cluster: Cluster) -> None:
    """A node that still runs a job of a scheduler before this one is told to stop it."""
    from protos.node_pb2 import SHARD, LaunchRequest, NodeStatusRequest
    from protos.node_pb2_grpc import NodeStub

    scheduler, to_scheduler = cluster.serve("--lease", "2")
    node = cluster.node(scheduler, "cpu", "--units", "1")
    shard = HeartbeatRequest(node=NodeStatus(node_id="any", kind="shard"))
    term = to_scheduler.Heartbeat(shard, timeout=5).term
    with connect(node.address) as channel:
        request = LaunchRequest(process_id="old.shard-0", job_id="old", role=SHARD, term=term)
        stub = NodeStub(channel)
        launching = stub.Launch.future(request, timeout=60)  # may be stopped before it is ready
        seen: list[int] = []

        def started() -> bool:
            seen.extend(p.pid for p in stub.Status(NodeStatusRequest(), timeout=10).processes)
            return bool(seen)

        wait_until(started)
        wait_until(lambda: not alive(seen[0]))
        launching.cancel()


def test_it_starts_without_what_planning_needs() -> None:
    heavy = "{'numpy', 'torch', 'scheduler.engine._planner'} & set(sys.modules)"
    code = f"import sys, scheduler.service.__main__; print(sorted({heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_two_schedulers_do_not_share_a_redis(cluster: Cluster) -> None:
    cluster.serve()
    second = subprocess.run(
        [sys.executable, "-m", "scheduler.service", "--redis", cluster.redis_url],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert second.returncode == 1
    assert "expected no other scheduler" in second.stderr


def test_an_unreachable_redis_is_named() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "scheduler.service", "--redis", "redis://127.0.0.1:1/0"],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert run.returncode == 1
    assert "redis 127.0.0.1:1" in run.stderr
    assert "Traceback" not in run.stderr


def test_watchers_are_told_when_the_scheduler_stops(cluster: Cluster, tmp_path: Path) -> None:
    scheduler, stub = cluster.serve()
    stub.Submit(SubmitRequest(job_id="waits", job=given_job(tmp_path, 0, ("v100",))), timeout=5)
    watching = stub.WatchJob(JobRequest(job_id="waits"), timeout=60)
    assert next(watching).state == QUEUED
    threading.Timer(0.3, scheduler.process.terminate).start()
    with pytest.raises(grpc.RpcError) as raised:
        list(watching)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert scheduler.process.wait(10) == 0


_PARENT = """
import sys, time
from scheduler.state.redis_server import EmbeddedRedis
redis = EmbeddedRedis(sys.argv[1]).start()
print(redis._child.pid, redis.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("victim", ["parent", "supervisor"])
def test_redis_ends_with_its_parent_however_that_dies(tmp_path: Path, victim: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    supervisor, server = map(int, parent.stdout.readline().split())
    assert alive(server)
    os.kill(parent.pid if victim == "parent" else supervisor, signal.SIGKILL)
    wait_until(lambda: not alive(server) and not alive(supervisor), "both end", 8.0)
    parent.kill()
    parent.wait()


def test_its_own_redis_ends_with_a_killed_scheduler(tmp_path: Path) -> None:
    child = Cluster(tmp_path).scheduler()
    supervised = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    servers = [
        int(pid)
        for supervisor in supervised
        for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    ]
    assert len(servers) == 1
    os.kill(child.pid, signal.SIGKILL)
    child.process.wait()
    wait_until(lambda: not alive(servers[0]), "it ends", 8.0)


def test_the_cause_comes_first_and_the_rest_fits_one_screen() -> None:
    killed = Symptom(
        Blame.KILLED, 2.0, "stage 1 worker 0 (pid 7) ended by signal 9 (SIGKILL)", "", "line\n" * 99
    )
    others = [
        Symptom(Blame.CONNECTION_LOST, 1.0 + i, f"worker {i} ended", "RpcError: x\ny" * 9)
        for i in range(20)
    ]
    text = explain([killed, *others])
    assert text.startswith("stage 1 worker 0 (pid 7) ended by signal 9 (SIGKILL)\n")
    assert len(text.splitlines()) < 40
    assert "also: worker 0 ended: " in text


def test_a_standing_shard_is_listed(stub: SchedulerStub) -> None:
    def listed() -> list[str]:
        nodes = stub.ListNodes(ListNodesRequest(), timeout=5).nodes
        return [n.node_id for n in nodes if n.kind == "shard"]

    shard = NodeStatus(node_id="shard-a", kind="shard", address="127.0.0.1:9")
    assert stub.Heartbeat(HeartbeatRequest(node=shard), timeout=5).lease_s == 5.0
    assert listed() == ["shard-a"]
    stub.Heartbeat(HeartbeatRequest(node=shard, leaving=True), timeout=5)
    assert not listed()
