"""A job that waits for units waits for nodes that have gone, too, and keeps no other waiting."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_INVALID_JOB,
    END_LOST_NODE,
    END_NO_CAPACITY,
    PLANNING,
    PROFILING,
    STARTING,
    JobStatus,
    NodeStatus,
)
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import Channels, Interrupted
from scheduler.runs.context import Context
from scheduler.runs.dispatcher import Dispatcher
from scheduler.runs.failures import JobError
from scheduler.runs.launch import place
from scheduler.runs.offer import wanted_types
from scheduler.runs.prepare import Preparation
from scheduler.runs.processes import Process
from scheduler.state.endings import Ending
from scheduler.state.jobs import Jobs
from scheduler.state.leadership import Leadership
from scheduler.state.nodes import Nodes
from scheduler.state.packing import Group
from scheduler.state.store import Store
from tests.scheduler.service.test_service import given_job
from tests.waiting import wait_until


class Room:
    """Nodes that come and go as a test says, and attempts that get as far as their units."""

    def __init__(self, store: Store) -> None:
        nodes = Nodes(store, lease_s=600.0)
        leadership = Leadership(store, "test")
        self.context = Context(store, Jobs(store), nodes, Channels(), "127.0.0.1:1", leadership)
        self.dispatcher = Dispatcher(self.context)
        self.errors: dict[str, Exception] = {}
        self._threads: list[threading.Thread] = []
        self._attempts: list[Attempt] = []

    def come(self, name: str, units: int = 1, kind: str = "cpu", role: str = "node") -> None:
        host = f"10.0.0.{ord(name[-1]) % 250}"
        self.context.nodes.renew(
            NodeStatus(node_id=name, kind=role, type=kind, units=units, address=f"{host}:1")
        )

    def go(self, name: str) -> None:
        """Its lease lapses."""
        with self.context.nodes.changed:
            self.context.nodes._leases[name].expires = 0.0

    def begin(self, name: str, job: JobSpec) -> Attempt:
        """Prepare a job up to where its processes would be started."""
        self.context.jobs.submit(name, job)
        return self._prepare(name, 1)

    def _prepare(self, name: str, number: int) -> Attempt:
        attempt = self.dispatcher._attempt(self.get(name), number)
        self._attempts.append(attempt)
        self.errors.pop(name, None)

        def prepare() -> None:
            try:
                Preparation(attempt, self.dispatcher._may_reserve).run()
            except Exception as error:
                self.errors[name] = error

        thread = threading.Thread(target=prepare)
        self._threads.append(thread)
        thread.start()
        return attempt

    def again(self, name: str) -> None:
        """Prepare the next attempt at a job whose nodes were lost."""
        self.context.nodes.release(name)
        assert self.context.jobs.retry(name, Ending(END_LOST_NODE, "a node is lost"), 0.0, 0)
        self._prepare(name, 2)

    def get(self, name: str) -> JobStatus:
        status = self.context.jobs.get(name)
        assert status is not None
        return status

    def waits(self, name: str, text: str) -> None:
        wait_until(lambda: text in self.get(name).reason, lambda: self.get(name).reason)
        assert name not in self.errors

    def starts(self, name: str) -> None:
        wait_until(lambda: self.get(name).state == STARTING, lambda: self.get(name).reason)
        assert self.get(name).reason == ""

    def close(self) -> None:
        for attempt in self._attempts:
            attempt.cancel()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture
def room(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    def launch(*arguments: object) -> None:
        raise Interrupted

    monkeypatch.setattr(Preparation, "_launch", launch)
    # There is no process at these nodes to look at a model.
    monkeypatch.setattr("scheduler.runs.prepare.may_depend_on_model", lambda *_: False)
    made = Room(store)
    yield made
    made.close()


def test_a_lease_that_lapses_ends_no_job_that_waits_for_units(room: Room, tmp_path) -> None:
    room.come("a", 2)
    assert room.context.nodes.reserve("other", [Group("cpu", 2)])
    attempt = room.begin("job", given_job(tmp_path, 1500.0))
    room.waits("job", "waits for 2 cpu to become free")
    assert (attempt.waits_for_units, attempt.waits_for_nodes) == (True, False)
    room.go("a")
    room.waits("job", "waits for a to come back")
    assert (attempt.waits_for_units, attempt.waits_for_nodes) == (True, True)
    assert room.get("job").state == PLANNING
    room.come("a", 2)
    room.waits("job", "to become free")
    room.context.nodes.release("other")
    room.context.nodes.renew(NodeStatus(node_id="z", kind="node"))  # something changes
    room.starts("job")


@pytest.mark.parametrize("come", ["a", "c"])
def test_nodes_that_a_job_has_lost_are_waited_for_however_long(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, come: str
) -> None:
    monkeypatch.setattr("scheduler.runs.prepare._RETURN_S", 0.1)
    room.come("a", 2)
    job = given_job(tmp_path, 1500.0)
    job.retries = 1
    room.begin("job", job)
    room.starts("job")
    room.go("a")
    room.come("b")  # too few for any plan
    room.again("job")
    room.waits("job", "waits for nodes that have gone to come back")
    time.sleep(0.5)
    room.waits("job", "waits for nodes that have gone to come back")
    room.come(come, 2)
    room.starts("job")
    assert room.get("job").attempt == 2


def test_other_nodes_of_the_type_do_as_well(room: Room, tmp_path) -> None:
    room.come("a", 2)
    assert room.context.nodes.reserve("other", [Group("cpu", 2)])
    room.begin("job", given_job(tmp_path, 1500.0))
    room.waits("job", "to become free")
    room.go("a")
    room.waits("job", "waits for a to come back")
    room.come("b")
    room.waits("job", "1 cpu are alive")
    room.come("c")
    room.starts("job")


def test_jobs_behind_one_that_waits_for_nodes_pass_it(room: Room, tmp_path, monkeypatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(
        "scheduler.runs.dispatcher.start", lambda attempt, may: begun.append(attempt.id.job_id)
    )
    room.come("a", 2)
    room.come("b", 1)
    assert room.context.nodes.reserve("other", [Group("cpu", 3)])
    room.begin("first", given_job(tmp_path, 1500.0))
    room.waits("first", "to become free")
    room.context.jobs.submit("second", given_job(tmp_path))
    room.dispatcher.step(wanted_types)
    assert begun == []  # the first gets its turn
    room.go("a")
    room.waits("first", "waits for a to come back")
    room.dispatcher.step(wanted_types)
    assert begun == ["second"]


def test_a_lease_that_lapses_before_there_is_a_plan_is_waited_for(room: Room, tmp_path) -> None:
    room.begin("job", given_job(tmp_path))
    room.waits("job", "waits: no node of a type of schedule.resources is alive: cpu")
    assert room.get("job").state == PROFILING
    room.come("a")
    room.starts("job")


def test_standing_shards_that_have_gone_are_waited_for(room: Room, tmp_path) -> None:
    room.come("a", 2)
    room.come("shard-s", 0, role="shard")
    assert room.context.nodes.reserve("other", [Group("cpu", 2)])
    room.begin("job", given_job(tmp_path))
    room.waits("job", "to become free")
    room.go("shard-s")
    room.context.nodes.release("other")
    room.waits("job", "waits for standing shards to come back: shard-s")
    assert [status.units_used for status in room.context.nodes.listed()] == [0]
    room.come("shard-s", 0, role="shard")
    room.starts("job")


def test_what_never_fits_fails_at_once(room: Room, tmp_path) -> None:
    """Every node is there, and still no host has room: waiting would not help."""
    for name in ("a", "b", "c"):
        room.come(name)
    job = given_job(tmp_path)
    job.schedule.given.ps_type, job.schedule.given.ps_core_s = "cpu", 0.0015
    job.schedule.min_throughput = 900.0
    job.servers.shards = 1
    room.begin("job", job)
    wait_until(lambda: room.errors)
    error = room.errors["job"]
    assert isinstance(error, JobError)
    assert error.ending.reason == END_NO_CAPACITY
    assert "2 cpu on one host, and none has so many" in error.ending.text


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_a_shard_is_where_its_cores_are_reserved(
    room: Room, tmp_path, count: int, monkeypatch
) -> None:
    found: list[list[Process]] = []

    def launch(self, spec, decision, units, standing) -> None:
        nodes = room.context.nodes
        found.append(place(self._attempt.id, spec, decision, units, standing, nodes))
        raise Interrupted

    monkeypatch.setattr(Preparation, "_launch", launch)
    room.come("a", 3)
    room.come("b", 2)
    room.come("c", 2)
    job = given_job(tmp_path)
    job.schedule.given.ps_type, job.schedule.given.ps_core_s = "cpu", 0.0015
    job.schedule.min_throughput = 900.0
    job.servers.shards = count
    room.begin("job", job)
    wait_until(lambda: found)
    decision = room._attempts[-1].decision
    assert decision.ps_units == 3
    shards = [process.node.node_id for process in found[0] if process.label.startswith("shard")]
    assert len(shards) == (count or 3)
    reserved = room.context.nodes._taken["job"]
    assert reserved.total() == 3 + sum(stage.units for stage in decision.stages)
    # Each shard has at its node the cores that are its share of the three.
    shares = [3 // len(shards) + (n < 3 % len(shards)) for n in range(len(shards))]
    stages = [p.node.node_id for p in found[0] if p.label.startswith("stage")]
    for node, units in reserved.items():
        own = sum(share for share, home in zip(shares, shards, strict=True) if home == node)
        assert own + stages.count(node) == units
    if count == 1:
        assert shards == ["a"]


def test_a_standing_shard_too_few_is_the_jobs_fault(room: Room, tmp_path) -> None:
    nodes = room.context.nodes
    room.come("shard-s", 0, role="shard")
    job = given_job(tmp_path)
    job.servers.shards = 2
    with pytest.raises(JobError) as raised:
        place(None, job, None, [], nodes.live("shard"), nodes)  # type: ignore[arg-type]
    assert raised.value.ending.reason == END_INVALID_JOB
