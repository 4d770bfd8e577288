"""Nodes with a shard die at whatever point; all go back with their processes, to the same bits."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.survive.job import Shape, result_of, write_job
from heterps import Client
from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import END_SUCCEEDED, JobStatus, NodeStatus
from tests.machines import SCHEDULER, Machines, running
from tests.pids import alive
from tests.waiting import wait_until

pytestmark = pytest.mark.exhaustive
SHAPE = Shape(seconds=0.002, steps=54)
EVERY = "7 steps"
NODES = {
    **{f"cpu-{number}": ("cpu", 1) for number in range(4)},
    **{f"front-{number}": ("front", 1) for number in range(3)},
    "back": ("back", 2),
}
# At each point that has a file of its name with process ids, these are killed: once, by whoever
# comes there first. No step is committed while there is a file "hold", and workers that were asked
# to regroup do not answer while there is a file "silent".
_FAULT = """
import importlib
import os
import signal
import time
from contextlib import suppress

from model import Model
from workers.links.service import StageService
from workers.stage.rows.commits import RowCommits
from workers.stage.cuts.folder import CutFolder
from workers.stage.regroups import Regroups
from workers.stage.rows.ahead import StageRows
from workers.stage.worker import Worker

POINTS = {
    "rows are pulled": (StageRows, "pull"),
    "a part is staged": (RowCommits, "_stage"),
    "a step is committed": (RowCommits, "_commit"),
    "a cut is written": (importlib.import_module("ps.client.save"), "_write_parts"),
    "a cut lacks its name": (CutFolder, "add"),
    "workers are asked": (Regroups, "ask"),
    "one worker goes on": (StageService, "Start"),
    "tables are loaded": (Worker, "_settle_tables"),
    "training is over": (Worker, "_write_weights"),
    "tables are to be saved": (Worker, "_save"),
}


def build(directory, **arguments):
    def strike(point):
        file = os.path.join(directory, point)
        try:
            os.rename(file, file + ", done")
        except FileNotFoundError:
            return
        with open(file + ", done") as told:
            for pid in told.read().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def wait(name):
        while os.path.exists(os.path.join(directory, name)):
            time.sleep(0.01)

    def patched(own, point):
        def strikes(*args, **kwargs):
            strike(point)
            if point == "a step is committed":
                wait("hold")
            return own(*args, **kwargs)

        return strikes

    for point, (where, name) in POINTS.items():
        setattr(where, name, patched(getattr(where, name), point))
    ask = Regroups.ask

    def asked(*args, **kwargs):
        reply = ask(*args, **kwargs)
        wait("silent")
        return reply

    Regroups.ask = asked
    return Model(**arguments)
"""


class Service:
    def __init__(self, machines: Machines, directory: Path) -> None:
        self.machines, self.directory = machines, directory
        write_job(directory, SHAPE)
        _give_each_shard_a_unit(directory)
        (directory / "fault.py").write_text(_FAULT)
        with (directory / ".heterpsignore").open("a") as file:
            file.write("!fault.py\n")
        self.client = Client(machines.address)
        self.killed: list[str] = []

    def submit(self, name: str, every: str = EVERY, **overrides: object) -> str:
        """Submit a job, and wait until it trains and has a checkpoint if it takes any."""
        self.faults = self.directory / f"faults-{name}"
        self.faults.mkdir()
        common = {
            "name": name,
            "retries": 9,
            "model.entry": "fault.py:build",
            "model.args.directory": str(self.faults),
        }
        cuts = {"train.checkpoint.every": every} if every else {}
        spec: JobSpec = load_job(self.directory / "job.json", common | cuts | overrides)
        job_id: str = self.client.submit(spec)
        wait_until(lambda: self.status(job_id).step >= 4, "it trains")
        if every:
            wait_until(lambda: self.status(job_id).cuts, "it has a checkpoint")
        return job_id

    def status(self, job_id: str) -> JobStatus:
        return self.client.status_message(job_id)

    def nodes(self, job_id: str) -> dict[str, NodeStatus]:
        """The node of each running process of a job, by its label."""
        return {process.label: node for node, process in running(self.client, job_id)}

    def pids(self, job_id: str) -> dict[str, int]:
        """The running processes of a job, by label."""
        return {process.label: process.pid for _, process in running(self.client, job_id)}

    def strike(self, point: str, *pids: int) -> None:
        """Have these killed when a worker comes to a point."""
        file = self.faults / point
        file.with_suffix(".new").write_text(" ".join(str(pid) for pid in pids))
        file.with_suffix(".new").rename(file)

    def lose(self, job_id: str, point: str, *shards: str) -> None:
        """Have the nodes of shards killed when a worker comes to a point, and the shards then."""
        nodes, pids = self.nodes(job_id), self.pids(job_id)
        lost = [nodes[shard].node_id for shard in shards]
        assert len({*lost}) == len(shards), "each has a node of its own"
        self.killed += lost
        self.strike(
            point,
            *(self.machines.pid(node) for node in lost),
            *(pids[shard] for shard in shards),
        )

    def restore(self) -> None:
        """Start the nodes again that were killed, with all that they kept."""
        for node in self.killed:
            self.machines.kill(node)
            self.machines.start(node)
        self.killed.clear()

    def end(self, job_id: str, *lost: str, back: bool | None = True) -> str:
        """What it came to in its only attempt, in which these were replaced; to the bit.

        Args:
            back: whether all went back; None: they may have.
        """
        wait_until(lambda: self.client.status(job_id).state.is_final, "it ends", 300)
        status = self.status(job_id)
        assert status.end_reason == END_SUCCEEDED, status.reason
        assert status.attempt == 1, [attempt.reason for attempt in status.attempts]
        assert status.step == SHAPE.steps
        names = {label for one in status.recoveries for label in one.lost}
        assert names == {*lost}
        assert back is None or any(one.back for one in status.recoveries) == back
        result = result_of(load_job(self.directory / "job.json"), self.directory / "out" / job_id)
        assert (result.trained == SHAPE.steps / SHAPE.steps_per_epoch).all()
        return result.digest


def _give_each_shard_a_unit(directory: Path) -> None:
    asked = json.loads((directory / "job.json").read_text())["schedule"]["min_throughput"]
    workload = json.loads((directory / "workload.json").read_text())
    workload["ps_core_s"] = 1.5 / asked
    (directory / "workload.json").write_text(json.dumps(workload))
    resources = json.loads((directory / "resources.json").read_text())
    for kind in resources["types"]:
        if kind["name"] == "cpu":
            kind["limit"] = 2
    (directory / "resources.json").write_text(json.dumps(resources))


@pytest.fixture(scope="module")
def machines_and_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("lost-shards")
    with Machines(directory, NODES) as machines:
        service = Service(machines, directory / "job")
        with service.client:
            yield service


@pytest.fixture
def service(machines_and_service: Service) -> Iterator[Service]:
    yield machines_and_service
    machines_and_service.restore()


@pytest.fixture(scope="module")
def unfailed(machines_and_service: Service) -> str:
    job_id = machines_and_service.submit("unfailed")
    return machines_and_service.end(job_id, back=False)


@pytest.mark.parametrize("every", [EVERY, ""])
@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("point", ["rows are pulled", "a part is staged", "a step is committed"])
def test_in_a_step(service: Service, unfailed: str, point: str, shard: int, every: str) -> None:
    name = f"{point.replace(' ', '-')}-{shard}-{every[:1] or 'never'}"
    job_id = service.submit(name, every)
    before = service.pids(job_id)
    service.lose(job_id, point, f"shard {shard}")
    wait_until(lambda: service.status(job_id).recoveries, "it is replaced", 60)
    again = f"shard {shard}, generation 1"
    after = wait_until(lambda: again in (found := service.pids(job_id)) and found, "it is listed")
    del before[f"shard {shard}"]
    assert {label: after.get(label) for label in before} == before
    (recovery,) = service.status(job_id).recoveries
    assert (recovery.step > 0 and recovery.step % 7 == 0) if every else recovery.step == 0
    assert service.end(job_id, f"shard {shard}") == unfailed


@pytest.mark.parametrize("point", ["a cut is written", "a cut lacks its name"])
def test_in_a_cut(service: Service, unfailed: str, point: str) -> None:
    job_id = service.submit(point.replace(" ", "-"))
    service.lose(job_id, point, "shard 1")
    assert service.end(job_id, "shard 1") == unfailed
    cuts = [cut.step for cut in service.status(job_id).cuts]
    assert cuts == sorted({*cuts})


@pytest.mark.parametrize("point", ["training is over", "tables are to be saved"])
def test_at_the_end(service: Service, unfailed: str, point: str) -> None:
    job_id = service.submit(point.replace(" ", "-"))
    service.lose(job_id, point, "shard 0")
    assert service.end(job_id, "shard 0") == unfailed


def test_both(service: Service, unfailed: str) -> None:
    job_id = service.submit("both")
    service.lose(job_id, "a step is committed", "shard 0", "shard 1")
    assert service.end(job_id, "shard 0", "shard 1") == unfailed


def test_one_after_the_other_while_tables_are_loaded(service: Service, unfailed: str) -> None:
    job_id = service.submit("one-by-one")
    service.lose(job_id, "a part is staged", "shard 0")
    service.lose(job_id, "tables are loaded", "shard 1")
    assert service.end(job_id, "shard 0", "shard 1") == unfailed


@pytest.mark.parametrize("point", ["workers are asked", "tables are loaded"])
def test_while_workers_are_replaced(service: Service, unfailed: str, point: str) -> None:
    job_id = service.submit(f"replaced-{point.replace(' ', '-')}")
    service.lose(job_id, point, "shard 1")
    os.kill(service.pids(job_id)["stage 0 worker 1"], signal.SIGKILL)
    assert service.end(job_id, "stage 0 worker 1", "shard 1") == unfailed


def test_with_a_worker_at_once(service: Service, unfailed: str) -> None:
    job_id = service.submit("at-once")
    victim = service.pids(job_id)["stage 1 worker 0"]
    service.lose(job_id, "a step is committed", "shard 0")
    wait_until(lambda: not (service.faults / "a step is committed").exists(), "it dies")
    os.kill(victim, signal.SIGKILL)
    assert service.end(job_id, "stage 1 worker 0", "shard 0") == unfailed


def test_a_scheduler_that_dies_when_the_shard_listens(service: Service, unfailed: str) -> None:
    """Nothing says yet that it is the job's."""
    job_id = service.submit("scheduler-before")
    (service.faults / "silent").touch()
    service.lose(job_id, "a step is committed", "shard 1")
    wait_until(lambda: "shard 1, generation 1" in service.pids(job_id), "it listens", 60)
    service.machines.kill(SCHEDULER)
    (service.faults / "silent").unlink()
    service.machines.start(SCHEDULER)
    assert service.end(job_id, "shard 1") == unfailed


def test_a_scheduler_that_dies_when_one_worker_goes_on(service: Service, unfailed: str) -> None:
    job_id = service.submit("scheduler-after")
    before = service.machines.pid(SCHEDULER)
    service.lose(job_id, "a step is committed", "shard 1")
    service.strike("one worker goes on", before)
    wait_until(lambda: not alive(before), "the scheduler dies", 60)
    service.machines.start(SCHEDULER)
    assert service.end(job_id, back=None) == unfailed


def test_a_node_with_a_shard_that_drains_is_left_with_nothing_lost(
    service: Service, unfailed: str
) -> None:
    job_id = service.submit("drained", "", retries=0)
    node, before = service.nodes(job_id)["shard 0"].node_id, service.pids(job_id)
    service.client.drain(node, 60.0)
    wait_until(lambda: service.status(job_id).recoveries, "it is left", 60)
    again = "shard 0, generation 1"
    after = wait_until(lambda: again in (found := service.pids(job_id)) and found, "it is listed")
    del before["shard 0"]
    assert {label: after.get(label) for label in before} == before
    (recovery,) = service.status(job_id).recoveries
    assert recovery.drained
    assert 4 <= recovery.step == recovery.reached < SHAPE.steps
    assert service.end(job_id, "shard 0") == unfailed
    assert not service.status(job_id).cuts, "it was to take none"
    wait_until(lambda: not alive(service.machines.pid(node)), "it ends by itself")
    service.killed.append(node)


def test_a_node_that_comes_back_at_once_has_none_of_the_rows(
    service: Service, unfailed: str
) -> None:
    """Its files are there still, and those of the one before are not the other's."""
    job_id = service.submit("back-at-once")
    node = service.nodes(job_id)["shard 1"].node_id
    service.machines.kill(node)
    service.machines.start(node)
    assert service.end(job_id, "shard 1") == unfailed


def test_a_shard_whose_node_was_cut_off_is_asked_by_nobody(service: Service, unfailed: str) -> None:
    """It runs on, with rows of before, and its node comes back."""
    job_id = service.submit("cut-off")
    node, pid = service.nodes(job_id)["shard 0"].node_id, service.pids(job_id)["shard 0"]
    (service.faults / "hold").touch()
    os.kill(service.machines.pid(node), signal.SIGSTOP)
    try:
        wait_until(
            lambda: node not in {one.node_id for one in service.client.nodes()},
            "it is taken for gone",
        )
        (service.faults / "hold").unlink()
        wait_until(lambda: service.status(job_id).recoveries, "it is replaced", 60)
        assert alive(pid)
    finally:
        os.kill(service.machines.pid(node), signal.SIGCONT)
    assert service.end(job_id, "shard 0") == unfailed
    wait_until(lambda: not alive(pid), "it ends with the job")
