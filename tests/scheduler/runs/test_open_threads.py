"""A job whose price list leaves open how many threads workers have, up to its units."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from protos.job_pb2 import JobSpec
from protos.node_pb2 import ProfileReply
from protos.scheduler_pb2 import NodeStatus
from scheduler.runs.calls import Interrupted
from scheduler.runs.offer import Offer
from scheduler.runs.prepare import Preparation
from scheduler.state.packing import Group
from scheduler.state.store import Store
from tests.scheduler.runs.test_waiting import Room
from tests.scheduler.service.test_service import given_job, workload
from tests.waiting import wait_until

# Seconds for a batch of a worker by its threads: two are three times as fast, four no faster still.
SECONDS = {1: 0.3, 2: 0.1, 4: 0.1}


class Measured(Room):
    """Nodes that measure what `SECONDS` says; `profiled` is with how many threads they did."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(store)
        self.profiled: list[int] = []
        self.held: list[dict[str, int]] = []

        def profile(
            attempt: object, spec: JobSpec, offer: Offer, nodes: Sequence[NodeStatus], *_: object
        ) -> ProfileReply:
            assert len(nodes) == 1
            (kind,) = offer.resources.types
            threads = kind.threads or 1
            self.profiled.append(threads)
            self.held.append(self.used())
            found = workload()
            found.ps_type, found.ps_core_s = "cpu", 1e-6
            found.layers[0].cost["cpu"].compute_s = SECONDS[threads]
            if threads > 1:
                found.threads["cpu"] = threads
            return ProfileReply(workload=found)

        def launch(*_: object) -> None:
            raise Interrupted

        monkeypatch.setattr("scheduler.runs.prepare.profile", profile)
        monkeypatch.setattr(Preparation, "_launch", launch)

    def used(self) -> dict[str, int]:
        """Units that are held, of those that nodes declare."""
        return {node.node_id: node.units_used for node in self.context.nodes.listed()}


@pytest.fixture
def room(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Measured]:
    made = Measured(store, monkeypatch)
    yield made
    made.close()


def _job(folder: Path, *numbers: int) -> JobSpec:
    job = given_job(folder)
    job.schedule.ClearField("given")
    job.schedule.offered.types[0].threads_any.extend(numbers)
    job.servers.shards = 1
    return job


def test_all_numbers_are_measured_and_the_cheapest_plan_has_its_cores(
    room: Measured, tmp_path: Path
) -> None:
    room.come("a", 8)
    attempt = room.begin("job", _job(tmp_path, 1, 2, 4))
    room.starts("job")
    assert room.profiled == [1, 2, 4]
    assert room.held == [{"a": 1}, {"a": 2}, {"a": 4}]  # while they are measured
    decision = attempt.decision
    (stage,) = decision.stages
    assert (stage.type, stage.threads, decision.ps_units) == ("cpu", 2, 1)
    assert room.used() == {"a": 2 * (stage.units + 1)}
    assert decision.price_per_hour == 2 * (stage.units + 1)
    (said,) = [line for line in decision.reasons if line.startswith("Each worker on cpu")]
    assert "computes on 2 cores: $" in said
    assert "; on 1 core: $" in said
    assert "; on 4 cores: $" in said


def test_a_number_is_not_waited_for_where_others_hold_the_cores(
    room: Measured, tmp_path: Path
) -> None:
    room.come("a", 8)
    room.come("b", 2)
    room.context.nodes.restore("other", ["a"] * 7 + ["b"])
    attempt = room.begin("job", _job(tmp_path, 1, 2, 4))
    wait_until(lambda: attempt.decision.stages)
    assert room.profiled == [1]  # of 2 and more no node has as many
    assert attempt.decision.stages[0].threads == 0
    assert not [line for line in attempt.decision.reasons if line.startswith("Each worker on")]


def test_workers_of_two_threads_wait_for_two_cores_of_one_node(
    room: Measured, tmp_path: Path
) -> None:
    room.come("a", 3)
    room.come("b", 3)
    job = _job(tmp_path, 2)
    job.schedule.min_throughput = 900.0
    assert room.context.nodes.reserve("other", [Group("cpu", 2), Group("cpu", 2)])
    attempt = room.begin("job", job)
    room.waits("job", "waits for 1 cpu to become free")  # to measure; two cores are, on two nodes
    room.context.nodes.give_back("other", ["a", "a"])
    wait_until(lambda: attempt.decision.stages)
    assert sum(stage.units for stage in attempt.decision.stages) + attempt.decision.ps_units == 2
    room.waits("job", "waits for 2 cpu to become free")
    room.context.nodes.release("other")
    room.starts("job")
    assert room.used() == {"a": 2, "b": 2}


def test_the_next_attempt_may_have_other_threads(
    room: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room.come("a", 8)
    job = _job(tmp_path, 1, 2)
    job.retries = 1
    room.begin("job", job)
    room.starts("job")
    first = room.used()["a"]
    assert first % 2 == 0
    monkeypatch.setitem(SECONDS, 1, 0.001)
    room.again("job")
    wait_until(lambda: room.profiled == [1, 2, 1, 2])
    wait_until(lambda: room._attempts[-1].decision.stages)
    room.starts("job")
    decision = room._attempts[-1].decision
    assert decision.stages[0].threads == 0
    held = Counter(room.used())
    assert held["a"] == sum(stage.units for stage in decision.stages) + decision.ps_units
