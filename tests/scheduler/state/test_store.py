"""The store against a real server: nothing twice, nothing lost, nothing backwards."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    CANCELLED,
    END_CANCELLED,
    END_SUCCEEDED,
    END_USER_ERROR,
    FAILED,
    PLANNING,
    PROFILING,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    EndReason,
    JobState,
    JobStatus,
    NodeStatus,
    ProgressReport,
    RunRecord,
)
from scheduler.state.endings import Ending
from scheduler.state.jobs import DuplicateError, Jobs
from scheduler.state.nodes import Nodes
from scheduler.state.packing import Group
from scheduler.state.redis_server import EmbeddedRedis
from scheduler.state.store import DeposedError, Store, StoreError, TransitionError


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    store._redis.flushall()
    yield store
    store.close()


def status(job_id: str, state: "JobStatus.state" = QUEUED) -> JobStatus:
    return JobStatus(job_id=job_id, name=job_id, state=state)


def test_submit_twice_creates_once(store: Store) -> None:
    assert store.submit(status("a"), JobSpec(name="first"))
    assert not store.submit(status("a"), JobSpec(name="second"))
    assert store.queue() == ["a"]
    spec = store.spec("a")
    assert spec is not None
    assert spec.name == "first"


def test_concurrent_submits_of_one_id_create_once(store: Store) -> None:
    jobs = Jobs(store)
    gate = threading.Barrier(16)

    def submit(_: int) -> bool:
        gate.wait()
        return jobs.submit("same", JobSpec(name="x"))

    with ThreadPoolExecutor(16) as pool:
        created = list(pool.map(submit, range(16)))
    assert sum(created) == 1
    assert store.queue() == ["same"]
    assert [s.job_id for s in jobs.all()] == ["same"]


def test_an_id_cannot_stand_for_two_jobs(store: Store) -> None:
    jobs = Jobs(store)
    jobs.submit("a", JobSpec(name="x"))
    with pytest.raises(DuplicateError, match="job a: submitted before with other content"):
        jobs.submit("a", JobSpec(name="y"))


def test_queue_is_first_come_first_served_and_leaving_queued_leaves_it(store: Store) -> None:
    for name in "abc":
        store.submit(status(name), JobSpec(name=name))
    assert store.queue() == ["a", "b", "c"]
    assert store.update(status("a", PROFILING))
    assert store.update(status("c", CANCELLED))
    assert store.queue() == ["b"]
    assert [s.job_id for s in store.statuses()] == ["a", "b", "c"]


@pytest.mark.parametrize("final", [SUCCEEDED, FAILED, CANCELLED])
def test_final_states_never_change(store: Store, final: int) -> None:
    store.submit(status("a"), JobSpec())
    assert store.update(status("a", final))
    for state in (QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED):
        assert not store.update(status("a", state))
    kept = store.status("a")
    assert kept is not None
    assert kept.state == final


def test_states_do_not_go_back(store: Store) -> None:
    store.submit(status("a"), JobSpec())
    store.update(status("a", RUNNING))
    with pytest.raises(TransitionError, match="cannot go back to PLANNING"):
        store.update(status("a", PLANNING))
    with pytest.raises(TransitionError, match="job b: unknown"):
        store.update(status("b", PLANNING))


def test_one_of_two_racing_ends_wins(store: Store) -> None:
    jobs = Jobs(store)
    jobs.submit("a", JobSpec())
    gate = threading.Barrier(2)

    def end(reason: "EndReason.ValueType") -> bool:
        gate.wait()
        return jobs.end("a", Ending(reason))

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(end, (END_CANCELLED, END_USER_ERROR))) == [False, True]
    kept, seen = store.status("a"), jobs.get("a")
    assert kept is not None
    assert seen is not None
    assert kept.state == seen.state


def enter(jobs: Jobs, job_id: str, state: "JobState.ValueType") -> None:
    def edit(status: JobStatus) -> None:
        status.state = state

    assert jobs.change(job_id, edit)


def test_jobs_survive_the_scheduler(store: Store) -> None:
    jobs = Jobs(store)
    for name in ("waits", "runs", "ended"):
        jobs.submit(name, JobSpec(name=name))
    enter(jobs, "runs", RUNNING)
    jobs.end("ended", Ending(END_CANCELLED))
    store.put_decision("runs", Decision(method="exact"))

    again = Jobs(store)
    assert [(s.job_id, s.state) for s in again.all()] == [
        ("waits", QUEUED),
        ("runs", RUNNING),
        ("ended", CANCELLED),
    ]
    assert [s.job_id for s in again.started()] == ["runs"]
    assert again.queued() == store.queue() == ["waits"]
    decision = store.decision("runs")
    assert decision is not None
    assert decision.method == "exact"


def test_watch_gives_now_then_changes_then_ends(store: Store) -> None:
    jobs = Jobs(store)
    jobs.submit("a", JobSpec())
    seen = []
    reader = threading.Thread(
        target=lambda: seen.extend(s.state for s in jobs.watch("a", lambda: False))
    )
    reader.start()
    for state in (PROFILING, RUNNING):
        threading.Event().wait(0.25)
        enter(jobs, "a", state)
    threading.Event().wait(0.25)
    jobs.end("a", Ending(END_SUCCEEDED))
    reader.join(5.0)
    assert seen == [QUEUED, PROFILING, RUNNING, SUCCEEDED]


def test_unreachable_redis_names_its_address_and_no_password() -> None:
    with pytest.raises(StoreError, match=r"redis 127\.0\.0\.1:1: ") as raised:
        Store("redis://user:secret@127.0.0.1:1/0", timeout_s=0.5).ping()
    assert "secret" not in str(raised.value)
    with pytest.raises(StoreError, match="expected redis://HOST:PORT/DB"):
        Store("nonsense://x")


def test_one_scheduler_at_a_time(store: Store, url: str) -> None:
    other = Store(url)
    assert store.take("one", 5.0)
    assert not other.take("two", 5.0)
    assert store.renew("one", 5.0)
    other.release("two")
    assert store.holder() == "one"
    store.release("one")
    assert other.take("two", 5.0)
    assert other.term > store.term
    assert not store.renew("one", 5.0)
    other.close()


def test_a_scheduler_whose_term_is_over_writes_nothing(store: Store, url: str) -> None:
    assert store.take("one", 0.05)
    jobs = Jobs(store)
    jobs.submit("a", JobSpec(name="first"))
    threading.Event().wait(0.1)
    other = Store(url)
    assert other.take("two", 5.0)
    for write in (
        lambda: store.submit(status("b"), JobSpec()),
        lambda: store.update(status("a", RUNNING)),
        lambda: store.requeue(status("a")),
        lambda: store.put_decision("a", Decision()),
        lambda: store.put_run("a", RunRecord()),
        lambda: store.put_final(ProgressReport(job_id="a")),
        lambda: store.put_log("a", "shard 0", 0, b"text"),
        lambda: store.put_node(NodeStatus(node_id="n"), 5.0),
        lambda: store.drop_node("n"),
    ):
        with pytest.raises(DeposedError, match="another scheduler works on it"):
            write()
    assert [(s.job_id, s.state) for s in other.statuses()] == [("a", QUEUED)]
    assert (other.logs("a"), other.finals("a"), other.known_nodes()) == ({}, [], [])
    assert other.update(status("a", RUNNING))
    assert Store(url).term == 0
    with pytest.raises(DeposedError):
        Store(url).submit(status("c"), JobSpec())
    other.close()


def test_leases_expire_in_redis_and_in_memory(store: Store) -> None:
    nodes = Nodes(store, lease_s=0.3)
    nodes.renew(NodeStatus(node_id="n", kind="node", type="cpu", units=2))
    assert [s.node_id for s, _ in store.nodes()] == ["n"]  # before it is used
    assert [s.node_id for s in Nodes(store, 0.3).live()] == ["n"]
    threading.Event().wait(0.4)
    assert store.nodes() == []
    assert nodes.live() == []
    assert nodes.departure("n") == "is lost: no heartbeat for 0.3 s"


def test_units_are_reserved_all_or_none_single_ones_spread_and_groups_packed(store: Store) -> None:
    nodes = Nodes(store)
    for name in ("a", "b"):
        nodes.renew(NodeStatus(node_id=name, kind="node", type="cpu", units=2, address=f"{name}:1"))
    first = nodes.reserve("one", [], ["cpu", "cpu"])
    assert first is not None
    assert [s.node_id for s in first] == ["a", "b"]
    assert nodes.reserve("two", [Group("cpu", 2)], ["cpu"]) is None
    assert nodes.reserve("two", [], ["gpu"]) is None
    assert [s.units_used for s in nodes.listed()] == [1, 1]
    assert nodes.reserve("two", [Group("cpu", 2)]) is not None
    assert nodes.reserve("three", [], ["cpu"]) is None
    nodes.release("one")
    nodes.release("two")
    packed = nodes.reserve("three", [Group("cpu", 2), Group("cpu", 1)], ["cpu"])
    assert packed is not None
    assert [s.node_id for s in packed[:2]] in (["a", "a"], ["b", "b"])
    assert packed[2] == packed[3] != packed[0]
    assert nodes.could_reserve([Group("cpu", 2, one_host=True)])
    assert not nodes.could_reserve([Group("cpu", 3, one_host=True)])


def test_data_outlives_the_server(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        Store(server.url).submit(status("kept"), JobSpec(name="kept"))
    with EmbeddedRedis(tmp_path) as server:
        assert Store(server.url).queue() == ["kept"]
