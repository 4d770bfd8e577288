"""Nodes, replacements and the scheduler die while workers are replaced; the result is the same."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.survive.job import Shape, result_of, write_job
from heterps import Client
from heterps.job.file import load_job
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import END_SUCCEEDED, JobStatus
from tests.machines import SCHEDULER, Machines, running
from tests.pids import alive
from tests.waiting import wait_until

pytestmark = pytest.mark.exhaustive
SHAPE = Shape(seconds=0.002, steps=54)
NODES = {
    "cpu": ("cpu", 1),
    **{f"front-{number}": ("front", 1) for number in range(3)},
    "back": ("back", 2),
}
# A worker of the second generation that kills itself, or the scheduler, at some point.
_FAULT = """
import os
import signal
import sys

from model import Model
from workers.links.service import StageService
from workers.stage.regroups import Regroups


def generation():
    frame = sys._getframe()
    while frame is not None:
        if "launch" in frame.f_locals and hasattr(frame.f_locals["launch"], "generation"):
            return frame.f_locals["launch"].generation
        frame = frame.f_back
    return 0


def build(when, scheduler, **arguments):
    def strike(pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    if generation() == 1 and when == "a replacement starts, and dies":
        strike(os.getpid())
    if generation() == 1 and when == "a replacement starts":
        strike(scheduler)
    ask, start = Regroups.ask, StageService.Start

    def asked(self, number, back):
        if number == 1 and when == "workers are asked":
            strike(scheduler)
        return ask(self, number, back)

    def started(self, topology, context):
        if topology.generation == 1 and when == "one worker goes on":
            strike(scheduler)
        return start(self, topology, context)

    Regroups.ask, StageService.Start = asked, started
    return Model(**arguments)
"""


class Service:
    def __init__(self, machines: Machines, directory: Path) -> None:
        self.machines, self.directory = machines, directory
        write_job(directory, SHAPE)
        (directory / "fault.py").write_text(_FAULT)
        with (directory / ".heterpsignore").open("a") as file:
            file.write("!fault.py\n")
        self.client = Client(machines.address)

    def submit(self, when: str = "", **overrides: object) -> str:
        if when:
            overrides |= {
                "model.entry": "fault.py:build",
                "model.args.when": when,
                "model.args.scheduler": self.machines.pid(SCHEDULER),
            }
        spec: JobSpec = load_job(self.directory / "job.json", {"retries": 9, **overrides})
        job_id: str = self.client.submit(spec)
        wait_until(lambda: self.client.status(job_id).step >= 4, "it trains")
        return job_id

    def pids(self, job_id: str) -> dict[str, int]:
        """The running processes of a job, by label."""
        return {process.label: process.pid for _, process in running(self.client, job_id)}

    def homes(self, job_id: str) -> dict[str, str]:
        """The nodes of its workers, by stage and rank."""
        return {
            process.label.partition(",")[0]: node.node_id
            for node, process in running(self.client, job_id)
            if process.label.startswith("stage")
        }

    def end(self, job_id: str) -> JobStatus:
        """How it ended, well."""

        def ended() -> bool:
            return self.client.status(job_id).state.is_final

        wait_until(ended, "it ends", 300)
        status = self.client.status_message(job_id)
        assert status.end_reason == END_SUCCEEDED, status.reason
        return status

    def digest(self, job_id: str) -> str:
        spec = load_job(self.directory / "job.json")
        result = result_of(spec, self.directory / "out" / job_id)
        assert (result.trained == SHAPE.steps / SHAPE.steps_per_epoch).all()
        return result.digest


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("faults")
    with Machines(directory, NODES) as machines:
        service = Service(machines, directory / "job")
        with service.client:
            yield service


@pytest.fixture(scope="module")
def unfailed(service: Service) -> str:
    job_id = service.submit()
    service.end(job_id)
    return service.digest(job_id)


def test_nodes_that_die_are_left_for_others_and_used_again(service: Service, unfailed: str) -> None:
    job_id = service.submit()
    for count in (1, 2):  # there is one spare node: the second death needs the first one's unit
        home = service.homes(job_id)["stage 0 worker 0"]
        service.machines.kill(home)
        wait_until(
            lambda: len(service.client.status_message(job_id).recoveries) >= count,  # noqa: B023
            "it is replaced",
        )
        service.machines.start(home)
        wait_until(lambda: service.homes(job_id).get("stage 0 worker 0"), "it is listed")
    status = service.end(job_id)
    assert (status.attempt, len(status.recoveries)) == (1, 2), [a.reason for a in status.attempts]
    assert service.digest(job_id) == unfailed


def test_free_units_of_a_node_that_died_are_no_home(tmp_path: Path, unfailed: str) -> None:
    """Its lease holds for a while yet."""
    nodes = {"cpu": ("cpu", 1), "wide": ("front", 3), "other": ("front", 2), "back": ("back", 2)}
    with Machines(tmp_path, nodes) as machines:
        service = Service(machines, tmp_path / "job")
        with service.client:
            job_id = service.submit()
            machines.kill(service.homes(job_id)["stage 0 worker 0"])
            status = service.end(job_id)
            assert (status.attempt, len(status.recoveries)) == (1, 1), status.attempts
            assert set(status.recoveries[0].lost) == {"stage 0 worker 0", "stage 0 worker 1"}
            assert service.digest(job_id) == unfailed


def test_a_replacement_that_dies_as_it_starts_is_replaced(service: Service, unfailed: str) -> None:
    job_id = service.submit("a replacement starts, and dies")
    os.kill(service.pids(job_id)["stage 1 worker 0"], signal.SIGKILL)
    status = service.end(job_id)
    assert status.attempt == 1, [attempt.reason for attempt in status.attempts]
    assert service.digest(job_id) == unfailed


def test_two_that_die_one_after_the_other_while_they_are_replaced(
    service: Service, unfailed: str
) -> None:
    job_id = service.submit()
    pids = service.pids(job_id)
    os.kill(pids["stage 0 worker 0"], signal.SIGKILL)
    time.sleep(0.15)
    os.kill(pids["stage 1 worker 1"], signal.SIGKILL)
    status = service.end(job_id)
    assert status.attempt == 1, [attempt.reason for attempt in status.attempts]
    assert service.digest(job_id) == unfailed


@pytest.mark.parametrize(
    "when", ["workers are asked", "a replacement starts", "one worker goes on"]
)
def test_a_scheduler_that_dies_meanwhile_is_followed_by_another(
    service: Service, unfailed: str, when: str
) -> None:
    before = service.machines.pid(SCHEDULER)
    job_id = service.submit(when)
    os.kill(service.pids(job_id)["stage 0 worker 1"], signal.SIGKILL)
    wait_until(lambda: not alive(before), "the scheduler dies")
    service.machines.start(SCHEDULER)
    status = service.end(job_id)
    assert status.attempt == 1, [attempt.reason for attempt in status.attempts]
    assert service.digest(job_id) == unfailed
