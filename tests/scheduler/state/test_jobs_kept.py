"""Which jobs are kept, and how they are listed a page at a time."""

import time

import pytest

from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import END_SUCCEEDED, JobStatus, ProgressReport
from scheduler.state import jobs as state
from scheduler.state.endings import Ending
from scheduler.state.jobs import Jobs
from scheduler.state.store import Store


def submitted(jobs: Jobs, count: int, user: str = "") -> list[str]:
    ids = [f"{user or 'job'}-{number}" for number in range(count)]
    for job_id in ids:
        jobs.submit(job_id, JobSpec(name=job_id), user)
    return ids


def ended(jobs: Jobs, job_id: str, ago_s: float = 7200.0) -> None:
    jobs.end(job_id, Ending(END_SUCCEEDED))
    jobs._statuses[job_id].ended_at = time.time() - ago_s


def listed(jobs: Jobs) -> list[str]:
    return [status.job_id for status in jobs.all()]


def test_of_the_jobs_that_ended_the_latest_are_kept(store: Store) -> None:
    jobs = Jobs(store)
    ids = submitted(jobs, 8)
    for job_id in ids:
        store.put_decision(job_id, Decision(seed=1))
        store.put_log(job_id, "stage 0", 0, b"line")
        store.put_final(ProgressReport(job_id=job_id, phase="done"))
    for job_id in (ids[0], ids[2], ids[3], ids[5], ids[6]):
        ended(jobs, job_id)
    ended(jobs, ids[4], ago_s=10.0)
    assert jobs.prune(2) == [ids[0], ids[2], ids[3]]
    left = [ids[1], ids[4], ids[5], ids[6], ids[7]]  # those that wait, the latest, and a fresh one
    assert listed(jobs) == left
    assert jobs.prune(2) == []
    assert listed(Jobs(store)) == left
    assert store.queue() == [ids[1], ids[7]]
    keys = {key.decode() for key in store._redis.keys("*")}
    for job_id in ids:
        of_it = {key for key in keys if key.endswith(f":{job_id}")}
        assert of_it == (
            {f"heterps:{kind}:{job_id}" for kind in ("job", "log", "final")}
            if job_id in left
            else set()
        )
    assert jobs.get(ids[0]) is None
    assert jobs.submit(ids[0], JobSpec(name="another"))  # its id is free


def test_a_job_that_has_not_ended_is_never_forgotten(store: Store) -> None:
    jobs = Jobs(store)
    (job_id,) = submitted(jobs, 1)
    assert not store.forget(job_id)
    assert listed(Jobs(store)) == [job_id]


def test_many_go_some_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_AT_ONCE", 2)
    jobs = Jobs(store)
    ids = submitted(jobs, 5)
    for job_id in ids:
        ended(jobs, job_id)
    assert [jobs.prune(0) for _ in range(4)] == [ids[:2], ids[2:4], ids[4:], []]


def test_pages_hold_each_job_once_and_those_that_somebody_sees(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "PAGE", 3)
    jobs = Jobs(store)
    own, other = submitted(jobs, 7, "ann"), submitted(jobs, 2, "bob")
    ended(jobs, own[1])

    def anns(status: JobStatus) -> bool:
        return status.submitted_by == "ann"

    found: list[str] = []
    before, pages = "", 0
    while True:
        page = jobs.page(anns, 0, before)
        assert (page.total, page.total_unended) == (7, 6)
        found[:0] = [status.job_id for status in page.jobs]
        pages += 1
        before = page.next
        if not before:
            break
    assert (found, pages) == (own, 3)

    def ids(limit: int, before: str = "", unended: bool = False) -> list[str]:
        page = jobs.page(lambda status: True, limit, before, unended)
        return [status.job_id for status in page.jobs]

    assert ids(2) == other
    assert ids(99) == [own[6], *other], "a page has no more, whatever is asked for"
    assert ids(2, own[3]) == own[1:3]
    assert ids(3, own[3], unended=True) == [own[0], own[2]]
    assert ids(3, own[0]) == []
    assert ids(3, "nobody") == []
    ended(jobs, own[3])
    assert ids(3, own[3], unended=True) == [own[0], own[2]], "also once that one has ended"


def test_a_page_goes_on_where_its_job_was_that_is_kept_no_more(store: Store) -> None:
    jobs = Jobs(store)
    ids = submitted(jobs, 6)
    first = jobs.page(lambda status: True, 2)
    assert [status.job_id for status in first.jobs] == ids[4:]
    for job_id in (ids[4], ids[1]):
        ended(jobs, job_id)
    assert jobs.prune(0) == [ids[1], ids[4]]
    second = jobs.page(lambda status: True, 2, first.next)
    assert [status.job_id for status in second.jobs] == ids[2:4]
    third = Jobs(store).page(lambda status: True, 2, second.next)
    assert [status.job_id for status in third.jobs] == ids[:1]
    assert not third.next
