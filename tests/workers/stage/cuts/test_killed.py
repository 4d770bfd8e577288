"""Workers as processes, killed at any moment, cuts being written; each attempt goes on."""

import random
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from chassis.channels import connect
from chassis.process import module_argv, spawn, stop_all
from chassis.servers import Server
from protos.decision_pb2 import PlanStage
from protos.job_pb2 import JobSpec
from protos.node_pb2 import STAGE, LaunchRequest
from protos.scheduler_pb2 import ReportReply
from protos.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from protos.stage_pb2 import StageWorkers, Topology
from protos.stage_pb2_grpc import StageStub
from ps import LocalShards, LocalTable
from tests.jobs import CLICKS_LAYERS, write_clicks
from workers.model.saved.cut import CutError, read_cut
from workers.model.saved.model import load

LIMIT_S = 200.0  # only a hang reaches it
JOB = "killed"


class Heard(SchedulerServicer):
    """A scheduler that takes reports."""

    def __init__(self):
        self.reports, self.lock = [], threading.Lock()

    def Report(self, request, context):
        with self.lock:
            self.reports.append(request)
        return ReportReply()

    def cuts(self):
        with self.lock:
            told = [r.cuts.cuts for r in self.reports if r.HasField("cuts")]
        return [cut.place for cut in told[-1]] if told else []


@pytest.fixture
def heard():
    servicer = Heard()
    server = Server("scheduler", "127.0.0.1:0", threads=8)
    server.add(add_SchedulerServicer_to_server, servicer, "heterps.v1.Scheduler")
    server.start()
    servicer.address = server.address
    yield servicer
    server.stop(0.1)


def job_in(folder):
    write_clicks(folder, rows=1024)
    job = JobSpec(name=JOB, directory=str(folder))
    job.model.entry = "model.py:build"
    job.model.args.update({"pause_s": 0.02})
    job.data.path, job.data.train, job.data.label = str(folder), "train.csv", "y"
    job.data.dense.append("x")
    job.data.sparse.extend(["a", "b"])
    job.train.epochs, job.train.batch_size, job.train.max_steps = 4, 64, 60
    job.train.loss = "bce_with_logits"
    job.train.optimizer.name, job.train.optimizer.learning_rate = "adam", 0.01
    job.train.optimizer.schedule, job.train.optimizer.warmup_steps = "cosine", 5
    job.train.checkpoint.every = "3 steps"
    job.train.checkpoint.keep = 3
    return job


def attempt(stack, folder, shards, heard, job, widths, number, resume):
    """Start the workers of an attempt; the processes."""
    last = len(CLICKS_LAYERS) - 1
    cuts = [(0, last)] if len(widths) == 1 else [(0, 0), (1, last)]
    stages = [
        PlanStage(first=first, last=end, units=width)
        for (first, end), width in zip(cuts, widths, strict=True)
    ]
    children, topology = [], Topology(job_id=JOB, shards=shards.addresses)
    for index, width in enumerate(widths):
        for rank in range(width):
            launch = LaunchRequest(
                process_id=f"{JOB}.{number}.{index}.{rank}",
                job_id=JOB,
                role=STAGE,
                job=job,
                index=index,
                rank=rank,
                stages=stages,
                layers=CLICKS_LAYERS,
                devices=["cpu"] * len(widths),
                scheduler=heard.address,
                output=str(folder / "model"),
                cuts=str(folder / "model.cuts"),
                resume=resume,
                attempt=number,
                micro_batches=4,
                staleness=0,
            )
            path = folder / f"{launch.process_id}.launch"
            path.write_bytes(launch.SerializeToString())
            argv = module_argv("workers.stage", "--launch", str(path))
            child = spawn(launch.process_id, argv, directory=folder / "logs")
            stack.callback(child.stop, 1.0)
            children.append((index, child))
    for index in range(len(widths)):
        ready = [child.wait_ready(LIMIT_S) for at, child in children if at == index]
        addresses = [child.address for child in ready]
        rendezvous = next((r for c in ready if (r := c.facts.get("rendezvous"))), "")
        topology.stages.append(StageWorkers(addresses=addresses, rendezvous=rendezvous))
    for stage in topology.stages:
        for address in stage.addresses:
            with connect(address) as channel:
                StageStub(channel).Start(topology, timeout=LIMIT_S)
    return [child for _, child in children]


def to_the_end(children):
    """Once the leader has saved the model the others, who stay for that, are told to end."""
    limit = time.monotonic() + LIMIT_S
    while children[-1].poll() is None and not any(child.poll() for child in children):
        assert time.monotonic() < limit, "hangs"
        time.sleep(0.1)
    stop_all(children, LIMIT_S)
    assert [child.poll() for child in children] == [0] * len(children), [
        child.log.read_text()[-3000:] for child in children
    ]


def result(folder):
    model = folder / "model"
    table = next(iter(LocalTable.load_checkpoint(model / "tables").values()))
    rows = table.pull(range(16), True).tolist()
    return load_file(model / "dense.safetensors"), rows, (model / "loss.csv").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("widths", [(1,), (2, 1)])
def test_a_training_that_is_killed_and_goes_on_is_bit_equal_to_one_that_was_not(
    tmp_path, heard, widths
):
    dice = random.Random(len(widths))
    expected, found = tmp_path / "expected", tmp_path / "found"
    for folder in (expected, found):
        folder.mkdir()
    with ExitStack() as stack:
        shards = stack.enter_context(LocalShards(2))
        job = job_in(expected)
        job.train.checkpoint.Clear()
        to_the_end(attempt(stack, expected, shards, heard, job, widths, 1, ""))
        assert not heard.cuts()
    with ExitStack() as stack:
        shards = stack.enter_context(LocalShards(2))
        job, resume, number = job_in(found), "", 0
        for number in range(1, 4):
            before = set(heard.cuts())
            children = attempt(stack, found, shards, heard, job, widths, number, resume)
            limit = time.monotonic() + LIMIT_S
            while len(set(heard.cuts()) - before) < 1:
                assert time.monotonic() < limit, "takes no cut"
                if any(child.poll() for child in children):
                    to_the_end(children)
                time.sleep(0.02)
            time.sleep(dice.random() * 0.1)
            for child in children:
                child.process.send_signal(signal.SIGKILL)
            for child in children:
                child.process.wait(LIMIT_S)
            resume = newest(found / "model.cuts")
            assert resume
        to_the_end(attempt(stack, found, shards, heard, job, widths, number + 1, resume))
    one, other = result(expected), result(found)
    assert one[0].keys() == other[0].keys()
    assert all(value.equal(other[0][name]) for name, value in one[0].items())
    assert one[1] == other[1]
    assert one[2] == other[2]
    load(newest(found / "model.cuts"))


def newest(cuts: Path) -> str:
    """What is found on the disk is whole, whenever its writers were killed."""
    steps = sorted((int(f.name) for f in cuts.iterdir() if f.name.isdecimal()), reverse=True)
    for step in steps:
        try:
            read_cut(str(cuts / str(step)))
        except CutError:
            assert not (cuts / str(step) / "cut.json").exists()
            continue
        return str(cuts / str(step))
    return ""
