"""What is kept of a job's course: bounded, whole from end to end, there after a restart."""

from itertools import pairwise

import pytest

from protos.scheduler_pb2 import QUEUED, RUNNING, SUCCEEDED, ProgressReport
from scheduler.state.history import MOST_POINTS, Histories
from scheduler.state.redis_server import EmbeddedRedis
from scheduler.state.store import Store, StoreError


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def histories(url):
    store = Store(url)
    yield Histories(store)
    store.close()


def report(job, step, stage=0, rank=0):
    return ProgressReport(
        job_id=job, stage=stage, rank=rank, step=step, samples=10 * step, train_seconds=0.5 * step
    )


def test_states_and_stages_are_kept_in_their_order(histories):
    for state in (QUEUED, RUNNING, RUNNING, SUCCEEDED):
        histories.enter("a", state)
    histories.add(report("a", 1, stage=1))
    histories.add(report("a", 1, stage=1, rank=1))
    histories.add(report("a", 1))
    found = histories.get("a")
    assert [one.state for one in found.states] == [QUEUED, RUNNING, SUCCEEDED]
    times = [one.at for one in found.states]
    assert times == sorted(times)
    assert {one.stage: len(one.points) for one in found.stages} == {0: 1, 1: 1}


def test_a_long_run_is_thinned_out_and_keeps_both_ends(histories):
    steps = 5 * MOST_POINTS + 3
    for step in range(1, steps + 1):
        histories.add(report("long", step))
    points = histories.get("long").stages[0].points
    found = [point.step for point in points]
    assert MOST_POINTS // 2 <= len(found) <= MOST_POINTS
    assert (found[0], found[-1]) == (1, steps)
    assert found == sorted(set(found))
    assert max(b - a for a, b in pairwise(found)) <= 8, "evenly, not old ones less"


def test_another_scheduler_takes_it_up(histories, url):
    histories.enter("kept", RUNNING)
    histories.add(report("kept", 1))
    histories.flush()
    store = Store(url)
    later = Histories(store)
    later.add(report("kept", 2))
    assert [p.step for p in later.get("kept").stages[0].points] == [1, 2]
    assert [s.state for s in later.get("kept").states] == [RUNNING]
    assert not Histories(store).get("unknown").states
    store.close()


def test_what_was_kept_comes_before_what_was_entered_while_redis_was_away(histories, url):
    histories.enter("away", QUEUED)
    histories.enter("away", RUNNING)
    for step in (1, 2):
        histories.add(report("away", step))
    histories.flush()
    store = Store(url)
    another, is_away = Histories(store), True
    real = store.history

    def history(job_id):
        if is_away:
            raise StoreError("away")
        return real(job_id)

    store.history = history
    another.enter("away", RUNNING)
    another.add(report("away", 3))
    another.enter("away", SUCCEEDED)
    with pytest.raises(StoreError):
        another.flush()
    is_away = False
    another.flush()
    for found in (another.get("away"), Histories(store).get("away")):
        assert [one.state for one in found.states] == [QUEUED, RUNNING, SUCCEEDED]
        assert [point.step for point in found.stages[0].points] == [1, 2, 3]
    store.close()
