"""A killed shard of a running job comes back by itself, and nothing is lost."""

import csv
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chassis.channels import connect
from chassis.exits import DAMAGED, reason_of_exit
from chassis.process import Child, spawn
from heterps import Client, Cluster
from heterps.job.file import load_job
from protos.node_pb2 import SHARD, LaunchReply, LaunchRequest
from protos.scheduler_pb2 import END_DISK_FULL, ListNodesRequest, ProcessStatus
from protos.scheduler_pb2_grpc import SchedulerStub
from ps import ParameterClient
from tests.disks import small_disk
from tests.jobs import write_ratings
from tests.pids import alive
from tests.waiting import wait_until
from workers.node import stopped
from workers.node.processes import LaunchError, Processes
from workers.node.restart import RestartRule

STEPS = 400
RULE = RestartRule(most=2, pause_s=0.01)


def launch(
    processes: Processes, durability: str = "log", job_id: str = "job", attempt: int = 0
) -> LaunchReply:
    request = LaunchRequest(
        process_id=f"{job_id}.shard-0", job_id=job_id, role=SHARD, attempt=attempt
    )
    request.job.servers.durability = durability
    return processes.launch(request)


def only(processes: Processes) -> ProcessStatus:
    (status,) = processes.statuses()
    return status


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path, "127.0.0.1", 60.0, rule=RULE)
    yield running
    running.close(5.0)


def test_a_killed_shard_returns_to_its_place_with_its_rows(
    processes: Processes, tmp_path: Path
) -> None:
    reply = launch(processes)
    seen: list[ProcessStatus] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.005):
            seen.extend(processes.statuses())

    with ParameterClient([reply.address], timeout_s=30) as client:
        client.create_table(
            "t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log"
        )
        watcher = threading.Thread(target=look)
        watcher.start()
        for push in range(30):
            client.push("t", np.arange(50), -np.ones((50, 2), np.float32))
            if push == 10:
                os.kill(reply.pid, signal.SIGKILL)
        stop.set()
        watcher.join()
        np.testing.assert_array_equal(client.pull("t", np.arange(50)), np.full((50, 2), 30.0))
    wait_until(lambda: only(processes).pid != reply.pid)
    status = only(processes)
    assert (status.running, status.restarts, status.note) == (True, 1, "")
    assert all(s.running and s.exit_code == 0 for s in seen), "nobody is told that it ended"
    assert {s.pid for s in seen} == {reply.pid, status.pid}
    assert launch(processes).address == reply.address
    kept = tmp_path / "job" / "shards"
    assert list(kept.glob("job.shard-0/log-*"))
    log = processes.read_log("job.shard-0", 0, 0)
    assert log is not None
    assert log.data.count(b"listens on") == 2
    assert processes.stop_job("job", 0, 5.0) == 1
    assert not alive(status.pid)
    assert not kept.exists()


def test_what_a_later_attempt_keeps_outlives_other_jobs(processes: Processes) -> None:
    """However many end on the node meanwhile: their folders go, and that of its first attempt."""
    processes.stop_job("job", 1, 0.0)
    reply = launch(processes, attempt=2)
    with ParameterClient([reply.address], timeout_s=30) as client:
        client.create_table(
            "t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log"
        )
        client.push("t", np.arange(50), -np.ones((50, 2), np.float32))
        for other in range(200):
            processes.stop_job(f"other-{other}", 1, 0.0)
        os.kill(reply.pid, signal.SIGKILL)
        np.testing.assert_array_equal(client.pull("t", np.arange(50)), np.ones((50, 2)))


def test_a_shard_that_is_stopped_for_good_is_killed_and_returns_with_its_rows(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped for a while stays as it is."""
    monkeypatch.setattr(stopped, "STILL_S", 0.5)
    reply = launch(processes)
    with ParameterClient([reply.address], timeout_s=30) as client:
        client.create_table(
            "t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log"
        )
        client.push("t", np.arange(50), -np.ones((50, 2), np.float32))
        os.kill(reply.pid, signal.SIGSTOP)
        wait_until(lambda: stopped.is_stopped(reply.pid))
        time.sleep(0.3)
        os.kill(reply.pid, signal.SIGCONT)
        client.push("t", np.arange(50), -np.ones((50, 2), np.float32))
        assert only(processes).pid == reply.pid
        os.kill(reply.pid, signal.SIGSTOP)
        np.testing.assert_array_equal(client.pull("t", np.arange(50)), np.full((50, 2), 2.0))
    wait_until(lambda: only(processes).pid != reply.pid)
    assert (only(processes).running, only(processes).restarts) == (True, 1)


def test_there_is_a_limit(processes: Processes) -> None:
    pid = launch(processes).pid
    for restarts in (1, 2):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda n=restarts: only(processes).restarts == n)
        wait_until(lambda p=pid: only(processes).pid != p)
        pid = only(processes).pid
        wait_until(lambda n=restarts: b"listens" in tail(processes, n))
        assert only(processes).running
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not only(processes).running)
    status = only(processes)
    assert status.exit_code == -signal.SIGKILL
    assert status.note == "was started again 2 times within 10 minutes"
    assert status.pid == pid


def tail(processes: Processes, runs: int) -> bytes:
    """The log of the shard's latest run, empty while it has not begun."""
    log = processes.read_log("job.shard-0", 0, 0)
    assert log is not None
    parts = log.data.split(b"listens on")
    return b"listens on" + parts[-1] if len(parts) == runs + 2 else b""


def test_a_shard_that_finds_no_room_says_so(tmp_path: Path) -> None:
    """Also where its log lies on the same disk."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        running = Processes(disk.path, "127.0.0.1", 60.0, rule=RULE)
        disk.fill()
        try:
            with pytest.raises(LaunchError, match=f"{disk.path}/job: has no room") as raised:
                launch(running)
        finally:
            running.close(5.0)
    assert reason_of_exit(raised.value.exit_code or 0) == END_DISK_FULL


def test_a_shard_that_refuses_to_start_ends_with_that_reason(
    processes: Processes, tmp_path: Path
) -> None:
    reply = launch(processes)
    with ParameterClient([reply.address], timeout_s=30) as client:
        client.create_table("t", 2, durability="log")
        for _ in range(5):
            client.push("t", np.arange(50), np.ones((50, 2), np.float32))
    os.kill(reply.pid, signal.SIGSTOP)
    (log,) = (tmp_path / "job" / "shards" / "job.shard-0").glob("log-*")
    damaged = bytearray(log.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    log.write_bytes(damaged)
    os.kill(reply.pid, signal.SIGKILL)
    wait_until(lambda: only(processes).note)
    status = only(processes)
    assert (status.running, status.exit_code, status.restarts) == (False, DAMAGED, 1)
    assert status.note == "was not started again: what it kept is damaged"
    assert "--accept-loss" in status.last_lines
    assert log.read_bytes() == damaged


@pytest.mark.parametrize("durability", ["none", ""])
def test_without_durability_its_death_is_final(processes: Processes, durability: str) -> None:
    pid = launch(processes, durability).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: only(processes).note)
    status = only(processes)
    assert (status.running, status.exit_code, status.restarts) == (False, -signal.SIGKILL, 0)
    assert "rows are lost" in status.note
    assert "servers.durability is none" in status.note


def test_a_job_that_is_stopped_gets_no_shard_back(processes: Processes, tmp_path: Path) -> None:
    pid = launch(processes).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: only(processes).restarts)
    processes.stop_job("job", 0, 5.0)
    own = f"{tmp_path}/job/".encode()
    mine = [p for p in Path("/proc").glob("[0-9]*/cmdline") if own in (read(p) or b"")]
    assert not mine
    assert not (tmp_path / "job" / "shards").exists()


def test_a_job_may_be_stopped_just_as_its_shard_is_about_to_be_started_again(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    about_to = threading.Event()
    start = threading.Thread.start

    def late(thread: threading.Thread) -> None:
        if thread.name == "start again":
            about_to.set()
            time.sleep(0.3)
        start(thread)

    pid = launch(processes).pid
    monkeypatch.setattr(threading.Thread, "start", late)
    os.kill(pid, signal.SIGKILL)
    assert about_to.wait(30)
    processes.stop_job("job", 0, 5.0)
    assert not processes.statuses()
    assert not [thread for thread in threading.enumerate() if thread.name == "start again"]


def test_a_shard_that_its_attempt_gives_up_is_not_started_again(
    processes: Processes, tmp_path: Path
) -> None:
    launch(processes)
    other = LaunchRequest(process_id="job.shard-0.g1", job_id="job", role=SHARD, generation=1)
    other.job.servers.durability = "log"
    kept = processes.launch(other)
    assert processes.stop_some("job", 0, {"job.shard-0"}, 5.0) == 1
    first, second = sorted(processes.statuses(), key=lambda status: status.process_id)
    assert (first.running, first.restarts) == (False, 0)
    assert (second.running, second.pid) == (True, kept.pid)
    assert second.label == "shard 0, generation 1"
    assert [path.name for path in (tmp_path / "job" / "shards").iterdir()] == ["job.shard-0.g1"]
    os.kill(kept.pid, signal.SIGKILL)
    wait_until(lambda: any(status.restarts for status in processes.statuses()))
    assert not any(s.running for s in processes.statuses() if s.process_id == "job.shard-0")


def test_a_shard_that_is_given_up_while_it_is_started_is_stopped(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, begun = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Child:
        begun.set()
        assert begin.wait(30.0)
        return spawn(*args, **options)

    monkeypatch.setattr("workers.node.starting.spawn", slow)
    with ThreadPoolExecutor(1) as pool:
        launched = pool.submit(launch, processes)
        assert begun.wait(30.0)
        assert processes.stop_some("job", 0, {"job.shard-0"}, 0.01) == 0  # none is there yet
        begin.set()
        with pytest.raises(LaunchError, match="shard 0 was stopped on this node"):
            launched.result()
    assert not only(processes).running
    assert not alive(only(processes).pid)


def read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def test_the_rule_grows_its_pauses_and_forgets_old_restarts() -> None:
    rule = RestartRule(most=5, window_s=600, pause_s=0.5, longest_s=3)
    restarts: list[float] = []
    pauses = []
    for now in range(5):
        pauses.append(rule.pause_before(restarts, float(now)))
        restarts.append(float(now))
    assert pauses == [0.0, 0.5, 1.0, 2.0, 3.0]
    assert rule.pause_before(restarts, 10.0) is None
    assert rule.pause_before(restarts, 601.5) == 2.0  # two are out of the window
    assert rule.pause_before(restarts, 1000.0) == 0.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), types={"cpu": 2}) as running:
        yield running


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    draw = np.random.default_rng(0)
    user, item = draw.integers(0, 500, 6000), draw.integers(0, 50, 6000)
    label = (draw.random(6000) < 1 / (1 + np.exp((user % 7) - 3.0))).astype(int)
    # The pause: so that two deaths fit into the run on any machine.
    return write_ratings(folder, zip(user, item, label, strict=True), STEPS, pause_s=0.005)


def submit(client: Client, job_file: Path, output: Path, *overrides: str) -> str:
    return client.submit(load_job(job_file, [f"output={output}", *overrides]))


def shard_of(cluster: Cluster, job_id: str) -> ProcessStatus:
    with connect(cluster.address) as channel:
        nodes = SchedulerStub(channel).ListNodes(ListNodesRequest(), timeout=10).nodes
    (shard,) = [p for n in nodes for p in n.processes if p.job_id == job_id and p.role == "shard"]
    return shard


def losses(output: str) -> list[float]:
    with open(Path(output) / "loss.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_training_goes_on_bit_for_bit_when_its_shard_is_killed(
    cluster: Cluster, job_file: Path, tmp_path: Path
) -> None:
    with Client(cluster.address) as client:
        calm = client.wait(submit(client, job_file, tmp_path / "calm"), timeout=120)
        assert calm.state == "succeeded", calm.reason
        job_id = submit(client, job_file, tmp_path / "killed")
        for kill in (1, 2):
            before = client.status(job_id).step
            wait_until(lambda b=before: client.status(job_id).step >= b + 20, "it trains on")
            os.kill(shard_of(cluster, job_id).pid, signal.SIGKILL)
            wait_until(lambda k=kill: shard_of(cluster, job_id).restarts == k)
        killed = client.wait(job_id, timeout=120)
    assert killed.state == "succeeded", killed.reason
    assert len(losses(calm.output)) == STEPS
    assert losses(killed.output) == losses(calm.output)
    assert calm.metrics["test_auc"] > 0.7
    assert dict(killed.metrics) == dict(calm.metrics)
