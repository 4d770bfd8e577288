"""The node daemon as a process: real shards, a real scheduler, real deaths."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import grpc
import pytest

from chassis.channels import connect
from chassis.process import Child
from chassis.refusal import reason_of
from protos.node_pb2 import (
    SHARD,
    STAGE,
    DrainRequest,
    LaunchReply,
    LaunchRequest,
    NodeStatusRequest,
    ProfileRequest,
    ReadLogRequest,
    StopJobRequest,
)
from protos.node_pb2_grpc import NodeStub
from protos.parameter_server_pb2 import StatsRequest
from protos.parameter_server_pb2_grpc import ParameterServerStub
from protos.reason_pb2 import (
    PROCESS_CRASHED,
    PROCESS_CUT_UNREADABLE,
    PROCESS_LACKS_ROOM,
    PROCESS_OUT_OF_MEMORY,
    PROCESS_UNFIT,
    REASON_UNSPECIFIED,
    Reason,
)
from protos.scheduler_pb2 import HeartbeatRequest, ListNodesRequest, NodeStatus
from protos.scheduler_pb2_grpc import SchedulerStub
from tests.cluster import Roles
from tests.pids import alive
from tests.waiting import wait_until

pytest.importorskip("ps.server")


class Daemon:
    """A node and a way to call it."""

    def __init__(self, child: Child, stub: NodeStub, scheduler: SchedulerStub) -> None:
        self.child = child
        self.stub = stub
        self.scheduler = scheduler
        shard = HeartbeatRequest(node=NodeStatus(node_id="any", kind="shard"), leaving=True)
        self.term = scheduler.Heartbeat(shard, timeout=10).term  # nodes obey no other

    def launch(self, process_id: str = "job.shard-0", job_id: str = "job") -> LaunchReply:
        request = LaunchRequest(process_id=process_id, job_id=job_id, role=SHARD, term=self.term)
        return self.stub.Launch(request, timeout=60)

    def stop_request(self, job_id: str) -> StopJobRequest:
        return StopJobRequest(job_id=job_id, grace_s=5, term=self.term)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    directory = tmp_path_factory.mktemp("scheduler")
    # It would stop processes of jobs it does not know, but not before a lease is over.
    with Roles(directory) as roles:
        yield roles.scheduler("--lease", "600")


@contextmanager
def daemon(scheduler: Child, directory: Path) -> Iterator[Daemon]:
    with Roles(directory) as roles:
        child = roles.node(scheduler, "cpu", "--units", "2")
        with connect(child.address) as to_node:
            yield Daemon(child, NodeStub(to_node), roles.stub(scheduler))


@pytest.fixture
def node(scheduler: Child, tmp_path: Path) -> Iterator[Daemon]:
    with daemon(scheduler, tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared(scheduler: Child, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One that tests of jobs of different ids have in common."""
    with daemon(scheduler, tmp_path_factory.mktemp("node")) as made:
        yield made


def test_a_shard_is_launched_once_per_id_and_stopped(node: Daemon) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: node.launch(), range(8)))
    assert len({reply.pid for reply in replies}) == 1
    reply = replies[0]
    with connect(reply.address) as channel:
        ParameterServerStub(channel).Stats(StatsRequest(), timeout=5)
    (process,) = node.stub.Status(NodeStatusRequest(), timeout=5).processes
    assert (process.label, process.running, process.pid) == ("shard 0", True, reply.pid)
    assert node.stub.StopJob(node.stop_request("job"), timeout=10).stopped == 1
    assert not alive(reply.pid)
    assert node.stub.StopJob(node.stop_request("job"), timeout=10).stopped == 0
    with pytest.raises(grpc.RpcError) as raised:
        node.launch("job.shard-1")
    assert raised.value.details() == "job job was stopped on this node"


def test_a_death_reaches_the_scheduler_at_once(node: Daemon) -> None:
    reply = node.launch()
    os.kill(reply.pid, signal.SIGKILL)

    def seen() -> list[int]:
        nodes = node.scheduler.ListNodes(ListNodesRequest(), timeout=5).nodes
        return [p.exit_code for n in nodes for p in n.processes if p.pid == reply.pid]

    wait_until(lambda: seen() == [-signal.SIGKILL], "its end is seen", 3.0)


def test_logs_are_read_by_offset_and_stay_after_the_end(node: Daemon) -> None:
    node.launch()

    def read(offset: int, limit: int = 0) -> tuple[bytes, int, bool]:
        request = ReadLogRequest(process_id="job.shard-0", offset=offset, limit=limit)
        reply = node.stub.ReadLog(request, timeout=5)
        return reply.data, reply.next_offset, reply.ended

    whole, end, ended = read(0)
    assert b"listens on" in whole
    assert (end, ended) == (len(whole), False)
    assert read(0, 4) == (whole[:4], 4, False)
    assert read(4, 4) == (whole[4:8], 8, False)
    assert read(1 << 62) == (b"", end, False)
    node.stub.StopJob(node.stop_request("job"), timeout=10)
    later, end, ended = read(0)
    assert later.startswith(whole)
    assert ended
    with pytest.raises(grpc.RpcError) as raised:
        node.stub.ReadLog(ReadLogRequest(process_id="nobody"), timeout=5)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_killed_node_leaves_no_orphans(node: Daemon) -> None:
    pids = [node.launch(f"job.shard-{i}").pid for i in range(2)]
    os.kill(node.child.pid, signal.SIGKILL)
    wait_until(lambda: not any(alive(pid) for pid in pids), "they end", 10.0)


def test_a_stopped_node_says_goodbye_and_stops_its_processes(node: Daemon) -> None:
    reply = node.launch()
    os.kill(node.child.pid, signal.SIGTERM)
    assert node.child.process.wait(10) == 0
    assert not alive(reply.pid)
    nodes = node.scheduler.ListNodes(ListNodesRequest(), timeout=5).nodes
    assert node.child.facts["node_id"] not in [n.node_id for n in nodes]


def test_a_node_drains_only_if_it_is_the_one_that_is_meant(node: Daemon) -> None:
    node.launch()
    asked = DrainRequest(term=node.term, node_id="the one before", notice_s=60.0)
    with pytest.raises(grpc.RpcError) as raised:
        node.stub.Drain(asked, timeout=5)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert not node.stub.Status(NodeStatusRequest(), timeout=5).draining
    asked.node_id = node.child.facts["node_id"]
    assert node.stub.Drain(asked, timeout=5).draining
    asked.notice_s = 600.0
    assert node.stub.Drain(asked, timeout=5).ends_in_s <= 60.0, "it has been told"
    assert node.stub.StopJob(node.stop_request("job"), timeout=10).stopped == 1
    assert node.child.process.wait(30) == 0, "nothing runs on it any more"


def test_a_node_that_drains_tells_what_it_stopped(scheduler: Child, tmp_path: Path) -> None:
    """However much of the job there is to remove once nothing of it runs."""
    with Roles(tmp_path) as roles:
        child = roles.node(scheduler, "cpu", "--directory", str(tmp_path / "node"))
        with connect(child.address) as channel:
            node = Daemon(child, NodeStub(channel), roles.stub(scheduler))
            node.launch()
            (kept,) = (tmp_path / "node" / "job" / "shards").iterdir()
            for number in range(100_000):
                (kept / str(number)).touch()
            node_id = child.facts["node_id"]
            asked = DrainRequest(term=node.term, node_id=node_id, notice_s=60.0)
            assert node.stub.Drain(asked, timeout=5).draining
            assert node.stub.StopJob(node.stop_request("job"), timeout=60).stopped == 1
            assert child.process.wait(30) == 0


def test_a_process_that_cannot_start_is_explained(shared: Daemon) -> None:
    request = LaunchRequest(process_id="bad.stage", job_id="bad", role=STAGE, term=shared.term)
    request.job.model.entry = "nowhere.py:build"
    request.stages.add(first=0, last=0, type="cpu", units=1)
    with pytest.raises(grpc.RpcError) as raised:
        shared.stub.Launch(request, timeout=90)
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "stage 0 worker 0 ended with exit code 1 before it was ready" in raised.value.details()
    assert "nowhere.py" in raised.value.details()
    assert reason_of(raised.value) == REASON_UNSPECIFIED


_OTHER_LAYERS = """
    from torch import nn
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.top = nn.Linear(1, 1)
        def forward(self, dense):
            return self.top(dense)
    return Net()
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.kill(os.getpid(), 9)", PROCESS_CRASHED),
        ("raise MemoryError", PROCESS_OUT_OF_MEMORY),
        ("raise ConnectionResetError", REASON_UNSPECIFIED),  # the job's own connection
        ("import sys; sys.exit(71)", REASON_UNSPECIFIED),
        ("import sys; sys.exit(75)", REASON_UNSPECIFIED),
        (_OTHER_LAYERS, PROCESS_UNFIT),
        ("raise OSError(28, 'no space left')", PROCESS_LACKS_ROOM),
    ],
)
def test_a_process_that_cannot_start_has_a_reason(
    shared: Daemon, tmp_path: Path, code: str, reason: Reason.ValueType
) -> None:
    (tmp_path / "model.py").write_text(f"import os\n\n\ndef build():\n    {code}\n")
    job_id = f"ends-{sha256(code.encode()).hexdigest()[:8]}"
    request = LaunchRequest(
        process_id=f"{job_id}.stage", job_id=job_id, role=STAGE, term=shared.term
    )
    request.job.directory, request.job.model.entry = str(tmp_path), "model.py:build"
    request.stages.add(first=0, last=0, type="cpu", units=1)
    with pytest.raises(grpc.RpcError) as raised:
        shared.stub.Launch(request, timeout=90)
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(raised.value) == reason


def test_a_worker_that_cannot_read_its_checkpoint_says_so(shared: Daemon, tmp_path: Path) -> None:
    """Before it listens: the job is to go on from the one before."""
    code = "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n"
    code += "        super().__init__(nn.Linear(1, 1), nn.Flatten(0))\n\n"
    code += "    def forward(self, dense):\n        return self[1](self[0](dense))\n"
    (tmp_path / "model.py").write_text(code)
    (tmp_path / "train.csv").write_text("y,x\n1,2\n0,3\n")
    request = LaunchRequest(process_id="cut.stage", job_id="cut", role=STAGE, term=shared.term)
    request.job.directory, request.job.model.entry = str(tmp_path), "model.py:Net"
    request.job.data.train, request.job.data.label = "train.csv", "y"
    request.job.data.dense.append("x")
    request.job.train.batch_size, request.job.train.loss = 2, "mse"
    request.job.train.optimizer.name = "sgd"
    request.layers.extend(["0", "1"])
    request.stages.add(first=0, last=1, type="cpu", units=1)
    request.resume = str(tmp_path / "job.cuts" / "40")
    with pytest.raises(grpc.RpcError) as raised:
        shared.stub.Launch(request, timeout=90)
    assert reason_of(raised.value) == PROCESS_CUT_UNREADABLE
    assert "CutError" in raised.value.details()


def test_a_node_without_room_for_a_job_says_so(node: Daemon) -> None:
    resource.prlimit(node.child.pid, resource.RLIMIT_FSIZE, (8, 8))
    launch = LaunchRequest(process_id="full.stage", job_id="full", role=STAGE, term=node.term)
    launch.job.model.entry = "model.py:build"
    launch.stages.add(first=0, last=0, type="cpu", units=1)
    profile = ProfileRequest(job_id="full", job=launch.job, term=node.term)
    for call in (
        lambda: node.stub.Launch(launch, timeout=90),
        lambda: node.stub.Profile(profile, timeout=90),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert reason_of(raised.value) == PROCESS_LACKS_ROOM
        assert "/full: " in raised.value.details(), "which disk"


def test_half_a_model_goes_with_the_attempt_that_left_it(shared: Daemon, tmp_path: Path) -> None:
    """A worker that was killed leaves it; another attempt's, or anybody else's, stays."""
    output = tmp_path / "out" / "half"
    partial = output.with_name("half.partial")

    def left_by(writer: str) -> bool:
        (partial / "tables").mkdir(parents=True, exist_ok=True)
        (partial / ".attempt").write_text(writer)
        request = shared.stop_request("half")
        request.attempt, request.unfinished = 2, str(output)
        shared.stub.StopJob(request, timeout=10)
        return partial.exists()

    assert [left_by(writer) for writer in ("1.0", "3.0", "22.0", "", "2.x", "2")] == [True] * 6
    output.mkdir()
    assert not left_by("2.1"), "of any generation"
    assert [path.name for path in output.parent.iterdir()] == ["half"]
    partial.mkdir()
    shared.stub.StopJob(shared.stop_request("half"), timeout=10)
    assert partial.exists(), "nothing says whose it is"


@pytest.mark.parametrize("bad", ["../../etc", "", "a/b", "-x"])
def test_ids_that_are_no_file_names_are_refused(shared: Daemon, bad: str) -> None:
    for call in (
        lambda: shared.launch(process_id=bad),
        lambda: shared.launch(job_id=bad),
        lambda: shared.stub.StopJob(shared.stop_request(bad), timeout=5),
        lambda: shared.stub.Profile(ProfileRequest(job_id=bad, term=shared.term), timeout=5),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_failed_profile_names_its_problem(shared: Daemon, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = torch.nn.Parameter(torch.ones(1))\n"
        "    def forward(self, dense):\n"
        "        return dense * self.scale\n"
    )
    for entry, told in (("nowhere.py:build", "nowhere.py"), ("own.py:Own", "'scale' belongs to")):
        request = ProfileRequest(job_id="wrong", term=shared.term)
        request.job.directory, request.job.model.entry = str(tmp_path), entry
        request.resources.types.add(name="cpu", device="cpu")
        with pytest.raises(grpc.RpcError) as raised:
            shared.stub.Profile(request, timeout=90)
        first = raised.value.details().splitlines()[0]
        assert first.startswith("profiling failed: ")
        assert told in first


def test_a_profile_ends_when_its_caller_goes_away(shared: Daemon, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    (tmp_path / "model.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(told)!r}).write_text(f'{{os.getpid()}}.')\n"
        "time.sleep(600)\n"
    )
    request = ProfileRequest(job_id="slow", term=shared.term)
    request.job.directory, request.job.model.entry = str(tmp_path), "model.py:build"
    request.resources.types.add(name="cpu", device="cpu")
    call = shared.stub.Profile.future(request, timeout=90)
    text = wait_until(lambda: told.exists() and told.read_text(), "the model is imported")
    profiler = int(text.partition(".")[0])
    assert alive(profiler)
    call.cancel()
    wait_until(lambda: not alive(profiler), "it ends", 5.0)


def run_node(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "workers.node", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_gpu_type_without_a_gpu_is_refused() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this host has a CUDA device")
    run = run_node("--type", "v100", "--scheduler", "127.0.0.1:1")
    assert run.returncode == 1
    assert "--type v100: needs a CUDA device" in run.stderr
    assert "Traceback" not in run.stderr
    run = run_node("--type", "cpu", "--device", "cuda", "--scheduler", "127.0.0.1:1")
    assert run.returncode == 1


def test_an_emulated_gpu_type_is_marked(scheduler: Child, tmp_path: Path) -> None:
    with Roles(tmp_path) as roles:
        child = roles.node(scheduler, "v100", "--emulate")
        with connect(child.address) as channel:
            status = NodeStub(channel).Status(NodeStatusRequest(), timeout=5)
    assert (status.type, status.units, status.emulated) == ("v100", 1, True)


def test_no_scheduler_is_an_error_that_names_it() -> None:
    run = run_node("--type", "cpu", "--scheduler", "127.0.0.1:1", "--wait", "1")
    assert run.returncode == 1
    assert "scheduler 127.0.0.1:1" in run.stderr
    assert "Traceback" not in run.stderr
    assert "expected a whole number" in run_node("--type", "cpu", "--units", "0").stderr


def test_a_cpu_node_starts_without_torch() -> None:
    heavy = "{'numpy', 'torch', 'pyarrow'} & set(sys.modules)"
    code = f"import sys, workers.node.__main__; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_lease_is_kept_while_processes_come_and_go(node: Daemon) -> None:
    for index in range(3):
        node.launch(f"job{index}.shard", f"job{index}")
        node.stub.StopJob(node.stop_request(f"job{index}"), timeout=10)
    threading.Event().wait(0.5)
    nodes = node.scheduler.ListNodes(ListNodesRequest(), timeout=5).nodes
    (mine,) = [n for n in nodes if n.node_id == node.child.facts["node_id"]]
    assert not mine.processes
