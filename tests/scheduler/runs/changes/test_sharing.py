"""A worker whose node dies where no unit is free shares one, and the result is the same."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.survive.job import Shape, result_of, write_job
from heterps import Client
from heterps.client.records import Job, Share
from heterps.job.file import load_job
from protos.scheduler_pb2 import END_SUCCEEDED, JobStatus
from tests.machines import SCHEDULER, Machines, running
from tests.pids import alive
from tests.scheduler.runs.survivors import FAULT
from tests.waiting import wait_until

pytest.importorskip("workers.stage")
SHAPE = Shape(seconds=0.001, steps=27)
NODES = {
    "cpu": ("cpu", 1),
    "front-0": ("front", 1),
    "front-1": ("front", 1),
    "back": ("back", 2),
}


class Service:
    """No unit is free of those that the job's plan has."""

    def __init__(self, machines: Machines, directory: Path) -> None:
        self.machines, self.directory, self.hold = machines, directory, directory / "held"
        write_job(directory, SHAPE)
        (directory / "fault.py").write_text(FAULT)
        with (directory / ".heterpsignore").open("a") as file:
            file.write("!fault.py\n")
        self.client = Client(machines.address)

    def begin(self, **overrides: object) -> str:
        """A job of whose steps none ends while it is held, so that it does not end, either."""
        held = {"model.entry": "fault.py:held", "model.args.file": str(self.hold)}
        spec = load_job(self.directory / "job.json", {"retries": 5, **held, **overrides})
        job_id: str = self.client.submit(spec)
        wait_until(lambda: self.client.status(job_id).step >= 4, "it trains")
        return job_id

    def homes(self, job_id: str) -> dict[str, str]:
        """The nodes of its workers, by stage and rank."""
        return {
            process.label.partition(",")[0]: node.node_id
            for node, process in running(self.client, job_id)
            if process.label.startswith("stage")
        }

    def beside(self, job_id: str, node_id: str) -> dict[str, int]:
        """Ids of its processes on a node where two workers run, by stage and rank; else none."""
        found = {
            process.label.partition(",")[0]: process.pid
            for node, process in running(self.client, job_id)
            if node.node_id == node_id
        }
        return found if len(found) == 2 else {}

    def used(self) -> dict[str, int]:
        """Units that jobs hold, by node."""
        return {node.node_id: node.units_used for node in self.client.nodes()}

    def shared(self, job_id: str) -> list[Share]:
        """Of those that share a unit now."""
        status: Job = self.client.status(job_id)
        assert not status.state.is_final, status.reason
        return [one for one in status.shares if not one.until]

    def loses(self, job_id: str, stage: str) -> Share:
        """Kill the node of a worker; how another unit is shared then."""
        self.hold.touch()
        self.machines.kill(self.homes(job_id)[stage])
        wait_until(lambda: self.shared(job_id), "it shares a unit")
        (share,) = self.shared(job_id)
        return share

    def end(self, job_id: str) -> JobStatus:
        """How it ended, well."""
        self.hold.unlink(missing_ok=True)
        wait_until(lambda: self.client.status(job_id).state.is_final, "it ends", 300)
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
    directory = tmp_path_factory.mktemp("sharing")
    with Machines(directory, NODES) as machines:
        service = Service(machines, directory / "job")
        with service.client:
            yield service


@pytest.fixture(scope="module")
def unfailed(service: Service) -> str:
    job_id = service.begin()
    service.end(job_id)
    return service.digest(job_id)


@pytest.fixture(autouse=True)
def all_nodes(service: Service) -> Iterator[None]:
    yield
    service.hold.unlink(missing_ok=True)
    for job in service.client.jobs():
        if not job.state.is_final:  # of a test that failed
            service.client.cancel(job.job_id)

    def all_there() -> bool:  # a node that is gone may be listed until its lease ends
        for name in NODES:
            if not alive(service.machines.pid(name)):
                service.machines.start(name)
        listed = service.client.nodes()
        return len(listed) == len(NODES) and not any(node.draining for node in listed)

    wait_until(all_there, "all are there again")


def test_it_shares_one_until_its_node_is_back(service: Service, unfailed: str) -> None:
    job_id = service.begin()
    before = service.homes(job_id)
    (other,) = {"front-0", "front-1"} - {before["stage 0 worker 1"]}
    share = service.loses(job_id, "stage 0 worker 1")
    assert (share.process, share.node, share.price_per_hour) == ("stage 0 worker 1", other, 1.0)
    assert 0 < share.throughput < service.client.decision(job_id).throughput
    wait_until(
        lambda: service.homes(job_id) == before | {"stage 0 worker 1": other},
        "its node's lease ends",
    )
    assert service.used()[other] == 1, "it does not pay a unit that nobody has"
    service.machines.start(before["stage 0 worker 1"])
    wait_until(lambda: not service.shared(job_id), "it has a unit again")
    wait_until(lambda: service.homes(job_id) == before, "it is listed there")
    assert service.used() == {"cpu": 1, "front-0": 1, "front-1": 1, "back": 2}
    status = service.end(job_id)
    assert (status.attempt, [one.drained for one in status.recoveries]) == (1, [False, True])
    assert not any(one.back for one in status.recoveries)
    assert service.digest(job_id) == unfailed


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["stage 0 worker 0", "stage 0 worker 1"])
def test_it_ends_where_the_node_stays_away(service: Service, unfailed: str, stage: str) -> None:
    job_id = service.begin()
    share = service.loses(job_id, stage)
    status = service.end(job_id)
    assert (status.attempt, len(status.recoveries)) == (1, 1)
    (one,) = status.shares
    assert one.until == pytest.approx(status.ended_at, abs=5.0)
    measured = service.client.decision(job_id).measured
    assert measured is not None
    whole = measured.seconds * measured.price_per_hour / 3600
    assert 0.5 * whole < measured.cost < whole, "two units in five were not paid for all the time"
    assert one.at == pytest.approx(share.at)
    assert service.digest(job_id) == unfailed


@pytest.mark.exhaustive
def test_who_shares_a_unit_dies_and_so_does_who_has_it(service: Service, unfailed: str) -> None:
    job_id = service.begin()
    share = service.loses(job_id, "stage 0 worker 0")
    for count, victim in enumerate(("stage 0 worker 0", "stage 0 worker 1"), 2):
        found = wait_until(lambda: service.beside(job_id, share.node), "both are listed")
        os.kill(found[victim], signal.SIGKILL)
        wait_until(
            lambda: len(service.client.status_message(job_id).recoveries) >= count,  # noqa: B023
            "it is replaced",
        )
        assert len(service.shared(job_id)) == 1
        assert service.used().get("front-0", 0) + service.used().get("front-1", 0) == 1
    status = service.end(job_id)
    assert status.attempt == 1
    assert service.digest(job_id) == unfailed


@pytest.mark.exhaustive
def test_another_scheduler_finds_who_shares_a_unit(service: Service, unfailed: str) -> None:
    job_id = service.begin()
    home = service.homes(job_id)["stage 0 worker 1"]
    share = service.loses(job_id, "stage 0 worker 1")
    service.machines.kill(SCHEDULER)
    service.machines.start(SCHEDULER)
    wait_until(lambda: service.used().get(share.node) == 1, "its nodes are found")
    assert [one.node for one in service.shared(job_id)] == [share.node]
    service.machines.start(home)
    wait_until(lambda: not service.shared(job_id), "it has a unit again")
    status = service.end(job_id)
    assert status.attempt == 1
    assert service.digest(job_id) == unfailed


@pytest.mark.exhaustive
def test_a_node_that_drains_is_left_for_a_unit_that_is_shared(
    service: Service, unfailed: str
) -> None:
    job_id = service.begin(**{"schedule.replan": "off"})
    home = service.homes(job_id)["stage 0 worker 1"]
    service.hold.touch()
    service.client.drain(home, 60.0)
    wait_until(lambda: service.shared(job_id), "it shares a unit")
    status = service.end(job_id)
    assert (status.attempt, [one.drained for one in status.recoveries]) == (1, [True])
    assert service.digest(job_id) == unfailed


@pytest.mark.exhaustive
def test_where_memory_holds_no_second_one_all_go_back_to_the_cut(
    service: Service, unfailed: str
) -> None:
    workload = json.loads((service.directory / "workload.json").read_text())
    for layer in workload["layers"]:
        for cost in layer["cost"].values():
            cost["memory_bytes"] = 3e11  # of three, in a unit of 1e12
    (service.directory / "large.json").write_text(json.dumps(workload))
    job_id = service.begin(
        **{"schedule.workload": "large.json", "train.checkpoint.every": "2 steps"}
    )
    home = service.homes(job_id)["stage 0 worker 1"]
    service.hold.touch()
    service.machines.kill(home)
    wait_until(lambda: service.client.status(job_id).attempt == 2, "another attempt waits")
    (went,) = service.client.status_message(job_id).attempts
    assert "need 1.8e+12 bytes, node front-" in went.reason, went.reason
    service.machines.start(home)
    status = service.end(job_id)
    assert (status.attempt, list(status.shares)) == (2, [])
    assert status.from_step >= 2
    assert service.digest(job_id) == unfailed
