"""A Redis that is killed, hangs and comes back: what was asked for meanwhile is not lost."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from chassis.refusal import reason_of
from protos.job_pb2 import JobSpec
from protos.reason_pb2 import STORE_UNREACHABLE
from protos.scheduler_pb2 import (
    CANCELLED,
    END_CANCELLED,
    END_LOST_NODE,
    END_SUCCEEDED,
    PROFILING,
    QUEUED,
    STARTING,
    SUCCEEDED,
    JobRequest,
    JobState,
    NodeStatus,
    RunRecord,
    SubmitRequest,
)
from scheduler.runs import run
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import Channels
from scheduler.runs.context import Context
from scheduler.runs.dispatcher import Dispatcher
from scheduler.runs.states import State
from scheduler.state.endings import Ending
from scheduler.state.jobs import Jobs
from scheduler.state.leadership import Leadership
from scheduler.state.nodes import Nodes
from scheduler.state.store import Store, StoreError
from tests.cluster import Roles
from tests.valkey import Valkey
from tests.waiting import wait_until

CANCELLED_BY_USER = Ending(END_CANCELLED, cancelled_by="ann")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Valkey]:
    with Valkey(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def context(redis: Valkey) -> Iterator[Context]:
    store = Store(redis.url, timeout_s=0.3)
    yield context_on(store)
    store.close()


def context_on(store: Store) -> Context:
    leadership = Leadership(store, f"test {time.monotonic_ns()}", hold_s=60.0)
    leadership.acquire()
    return Context(store, Jobs(store), Nodes(store), Channels(), "127.0.0.1:1", leadership)


def another(context: Context) -> Context:
    """As a scheduler started after that one finds things."""
    context.leadership.release()
    return context_on(context.store)


def submitted(context: Context, retries: int = 0) -> None:
    context.jobs.submit("job", JobSpec(name="job", retries=retries))


def begun(context: Context) -> tuple[Dispatcher, Attempt]:
    """An attempt that is at work, on no thread."""
    dispatcher = Dispatcher(context)
    status = context.jobs.get("job")
    assert status is not None
    attempt = dispatcher._attempt(status, 1)
    attempt.enter(State.PROFILING)
    return dispatcher, attempt


def stored(context: Context) -> "JobState.ValueType":
    status = context.store.status("job")
    return status.state if status is not None else JobState.JOB_UNSPECIFIED


def test_an_acknowledged_cancel_outlives_redis_and_scheduler(redis: Valkey, tmp_path: Path) -> None:
    job = JobSpec(name="job")
    job.schedule.offered.types.add(name="v100", price_per_hour=1.0)
    request = JobRequest(job_id="job")
    with Roles(tmp_path, redis.url) as roles:
        scheduler = roles.scheduler()
        stub = roles.stub(scheduler)
        stub.Submit(SubmitRequest(job_id="job", job=job), timeout=20)
        redis.kill()
        with pytest.raises(grpc.RpcError) as raised:
            stub.CancelJob(request, timeout=60)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(raised.value) == STORE_UNREACHABLE
        assert "cancel it again" in raised.value.details()
        redis.start()
        assert stub.CancelJob(request, timeout=60).state == CANCELLED
        os.kill(scheduler.pid, signal.SIGKILL)
        scheduler.process.wait()
        stub = roles.stub(roles.scheduler())
        assert stub.GetJob(request, timeout=60).state == CANCELLED


def test_a_cancel_that_redis_did_not_take_is_written_when_it_is_back(
    redis: Valkey, context: Context
) -> None:
    submitted(context)
    dispatcher = Dispatcher(context)
    redis.kill()
    with pytest.raises(StoreError):
        dispatcher.cancel("job", CANCELLED_BY_USER, 5.0)
    assert context.jobs.state("job") == CANCELLED
    redis.start()
    assert stored(context) == QUEUED
    context.jobs.flush()
    assert stored(context) == CANCELLED


@pytest.mark.parametrize("state", [PROFILING, STARTING, QUEUED])
def test_a_scheduler_that_takes_over_ends_what_was_cancelled(
    context: Context, state: "JobState.ValueType"
) -> None:
    submitted(context)
    if state != QUEUED:
        context.jobs.change("job", lambda status: setattr(status, "state", state))
    context.store.put_run("job", RunRecord(attempt=1))
    context.store.put_cancelled("job", "ann")
    after = another(context)
    Dispatcher(after).resume()
    wait_until(lambda: stored(after) == CANCELLED, "it is ended")
    status = after.store.status("job")
    assert status is not None
    assert status.cancelled_by == "ann"


def test_a_cancel_of_a_job_at_work_is_in_redis_before_its_end(context: Context) -> None:
    submitted(context)
    dispatcher, attempt = begun(context)
    dispatcher.cancel("job", CANCELLED_BY_USER, 0.0)  # its thread does not end it: there is none
    assert attempt.is_cancelled()
    assert context.store.cancelled("job") == "ann"
    assert stored(context) == PROFILING


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_cancel_while_an_end_waits_for_redis_wins_over_a_retry(
    redis: Valkey, context: Context, how: str
) -> None:
    submitted(context, retries=3)
    dispatcher, attempt = begun(context)
    if how == "kill":
        redis.kill()
    else:
        redis.stop()
    ending = Ending(END_LOST_NODE, "its node went")
    finishing = threading.Thread(target=run._finish, args=(attempt, ending))
    finishing.start()
    wait_until(lambda: attempt.state is State.STOPPING)
    with pytest.raises(StoreError):
        dispatcher.cancel("job", CANCELLED_BY_USER, 1.0)
    if how == "kill":
        redis.start()
    else:
        redis.go_on()
    finishing.join(60)
    assert attempt.state is State.ENDED
    dispatcher.cancel("job", CANCELLED_BY_USER, 30.0)
    assert stored(context) == CANCELLED


def test_a_cancel_just_after_a_retry_is_of_the_job_and_not_of_the_attempt(
    context: Context,
) -> None:
    submitted(context, retries=3)
    dispatcher, attempt = begun(context)
    run._finish(attempt, Ending(END_LOST_NODE, "its node went"))
    assert stored(context) == QUEUED
    assert dispatcher.get("job") is attempt  # until the next step
    dispatcher.cancel("job", CANCELLED_BY_USER, 30.0)
    assert stored(context) == CANCELLED


def test_a_job_that_redis_took_without_an_answer_is_queued_when_submitted_again(
    context: Context,
) -> None:
    jobs = context.jobs
    spec = JobSpec(name="job")
    Jobs(context.store).submit("job", spec)  # as a call did whose answer was lost
    assert jobs.queued() == []
    assert not jobs.submit("job", spec)
    assert jobs.queued() == ["job"]


def test_a_job_that_redis_has_lost_ends_all_the_same(context: Context) -> None:
    submitted(context, retries=3)
    _, attempt = begun(context)
    context.store._redis.delete("heterps:job:job")
    run._run(attempt, lambda other: True)
    assert attempt.over.is_set()
    assert context.jobs.state("job") not in (QUEUED, PROFILING)


def test_a_trained_job_waits_for_redis_to_write_its_end(redis: Valkey, context: Context) -> None:
    submitted(context)
    _, attempt = begun(context)
    redis.kill()
    keeping = threading.Thread(target=lambda: attempt.keep(attempt.decision))
    keeping.start()
    run_end = threading.Thread(target=run._finish, args=(attempt, Ending(END_SUCCEEDED)))
    run_end.start()
    wait_until(lambda: attempt.state in (State.STOPPING, State.ENDED))
    redis.start()
    keeping.join(60)
    run_end.join(60)
    context.jobs.flush()
    assert stored(context) == SUCCEEDED
    assert context.store.decision("job") is not None


def test_an_attempt_that_breaks_at_its_end_is_given_up_and_starts_over(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(context, retries=3)
    dispatcher, attempt = begun(context)
    with monkeypatch.context() as fault:

        def broken(*arguments: object) -> None:
            raise KeyError("unexpected")

        fault.setattr(context.nodes, "release", broken)
        fault.setattr(run, "_PAUSE_S", 0.0)
        run._run(attempt, lambda other: True)
    assert attempt.state is State.HANDED_OVER
    dispatcher.step(lambda job: ["v100"])
    wait_until(lambda: stored(context) == QUEUED, "it waits again")
    status = context.store.status("job")
    assert status is not None
    assert len(status.attempts) == 1


def test_a_redis_that_hangs_leaves_the_leader_certain_and_nodes_alive(
    redis: Valkey, context: Context
) -> None:
    leadership = Leadership(context.store, "hung", hold_s=0.3)
    context.leadership.release()
    leadership.acquire()
    node = NodeStatus(node_id="n", kind="node", type="cpu", units=1)
    context.nodes.renew(node)
    redis.stop()
    with pytest.raises(StoreError):
        leadership.renew()
    time.sleep(0.4)  # longer than its hold
    assert leadership.is_certain()
    context.nodes.renew(node)  # waits for nobody
    with pytest.raises(StoreError):
        context.nodes.flush()
    assert context.nodes.get("n") is not None
    redis.go_on()
    context.nodes.flush()
    assert [status.node_id for status, _ in context.store.nodes()] == ["n"]


def test_one_that_does_not_answer_is_asked_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = Store(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", timeout_s=0.2)
        with pytest.raises(StoreError):
            store.ping()
        silent.settimeout(0.2)
        silent.accept()
        with pytest.raises(TimeoutError):
            silent.accept()
