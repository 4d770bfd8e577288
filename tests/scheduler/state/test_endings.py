"""Which reason goes with which end, and which ends are forgiven."""

from heterps.view.failure import MEANINGS, NOT_THE_JOB
from protos.scheduler_pb2 import (
    END_CUT_UNREADABLE,
    END_LOST_NODE,
    END_SCHEDULER_LOST,
    END_UNSPECIFIED,
    END_USER_ERROR,
    EndReason,
    JobStatus,
)
from scheduler.state.endings import (
    RETRIED,
    SCHEDULER_LIMIT,
    Ending,
    last_error,
    may_retry,
    start_over,
)

_TRACEBACK = """\
Traceback (most recent call last):
  File "model.py", line 3, in build
    raise ValueError("bad")
ValueError: bad
12:00:00 I stage 0: leaving
"""


def test_the_error_is_the_last_line_of_the_traceback() -> None:
    assert last_error(_TRACEBACK.splitlines()) == "ValueError: bad"
    assert last_error(["something else", ""]) == "something else"
    assert last_error([]) == ""


def test_faults_that_are_not_the_jobs_own_are_forgiven_as_often_as_it_says() -> None:
    status = JobStatus(job_id="a", attempt=1, retries=1, samples=5)
    assert not may_retry(status, Ending(END_USER_ERROR))
    lost = Ending(END_LOST_NODE, "node n is lost\nmore", "node n", "no heartbeat")
    assert may_retry(status, lost)
    start_over(status, lost, 7.0)
    assert (status.samples, status.end_reason) == (0, END_UNSPECIFIED)
    assert status.reason == "attempt 1 ended: node n is lost"
    assert [(a.number, a.end_reason, a.ended_at) for a in status.attempts] == [
        (1, END_LOST_NODE, 7.0)
    ]
    assert not may_retry(status, lost)
    # Attempts that a scheduler took along cost none of the job's retries, but are not endless.
    for _ in range(SCHEDULER_LIMIT):
        assert may_retry(status, Ending(END_SCHEDULER_LOST))
        start_over(status, Ending(END_SCHEDULER_LOST), 8.0)
    assert not may_retry(status, Ending(END_SCHEDULER_LOST))


def test_nodes_that_drain_cost_none_of_the_retries() -> None:
    status = JobStatus(job_id="a", attempt=1, retries=1)
    left = Ending(END_LOST_NODE, "node n drains", "node n", drained=True)
    for _ in range(3):
        assert may_retry(status, left)
        start_over(status, left, 7.0)
    status.recoveries.add(drained=True)
    lost = Ending(END_LOST_NODE, "node n is lost", "node n")
    assert may_retry(status, lost)
    status.recoveries.add()
    assert not may_retry(status, lost)
    assert may_retry(status, left)


def test_every_reason_has_a_meaning_for_people() -> None:
    names = {name.removeprefix("END_").lower() for name in EndReason.DESCRIPTOR.values_by_name} - {
        "unspecified"
    }
    assert set(MEANINGS) == names
    assert {EndReason.Name(r).removeprefix("END_").lower() for r in RETRIED} == NOT_THE_JOB


def test_cuts_and_owner_stay_when_a_job_starts_over() -> None:
    status = JobStatus(job_id="a", attempt=1, retries=1, step=27, started_at=5.0)
    status.submitted_by = "anna"
    for step in (10, 20):
        status.cuts.add(step=step)
    start_over(status, Ending(END_LOST_NODE, "node n is lost"), 7.0, 3.5)
    assert status.submitted_by == "anna"
    assert status.reason == "attempt 1 ended: node n is lost; it goes on from step 20"
    (one,) = status.attempts
    assert (one.step, one.started_at, one.price_per_hour) == (27, 5.0, 3.5)
    # Each cut that cannot be read is given up, whatever `retries` says, and there is an end to it.
    for step in (20, 10):
        status.from_step = step
        assert may_retry(status, Ending(END_CUT_UNREADABLE))
        start_over(status, Ending(END_CUT_UNREADABLE), 8.0)
    assert len(status.cuts) == 0
    assert not may_retry(status, Ending(END_CUT_UNREADABLE))


def test_a_cut_that_an_attempt_went_back_to_and_cannot_read_gives_way_to_the_one_before() -> None:
    status = JobStatus(job_id="a", attempt=2, retries=1, from_step=10)
    for step in (5, 10, 20):
        status.cuts.add(step=step)
    status.recoveries.add(attempt=1, back=True, step=5)
    status.recoveries.add(attempt=2, back=True, step=20)
    unreadable = Ending(END_CUT_UNREADABLE)
    assert may_retry(status, unreadable)
    start_over(status, unreadable, 7.0)
    assert [cut.step for cut in status.cuts] == [5, 10]
