"""`heterps status JOB`: all about a job on one screen."""

import json
from collections.abc import Callable

from heterps.client import archive
from heterps.errors import OK
from protos import scheduler_pb2 as pb

Run = Callable[..., tuple[int, str, str]]


def failed() -> pb.JobStatus:
    status = pb.JobStatus(
        job_id="clicks-aaa111",
        name="clicks",
        state=pb.FAILED,
        end_reason=pb.END_USER_ERROR,
        process="stage 0 worker 1",
        error="KeyError: 'age'",
        reason="stage 0 worker 1 (pid 7) ended with exit code 1\nKeyError: 'age'\n"
        "the last lines of its log:\n  reading row 7",
        last_lines="reading row 7",
        submitted_at=1e9,
        started_at=1e9 + 5,
        ended_at=1e9 + 60,
        step=30,
        total_steps=120,
        attempt=2,
        retries=1,
    )
    status.attempts.add(number=1, end_reason=pb.END_LOST_NODE, error="no heartbeat for 5 s")
    return status


def test_a_failure_is_one_screen_with_what_to_type_next(run: Run) -> None:
    archive.add(failed(), None, [])
    code, out, _ = run("status", "clicks")
    assert code == OK
    assert len(out.splitlines()) < 40
    for part in (
        "clicks-aaa111 failed",
        "user_error: the job's own code raised an error, in stage 0 worker 1",
        "KeyError: 'age'",
        "reading row 7",
        "step 30 of 120 (25%)",
        "2 (retries: 1)",
        "lost_node: no heartbeat for 5 s",
        "heterps logs clicks-aaa111",
    ):
        assert part in out, part
    assert "start over" not in out  # it would fail again


def test_the_same_for_programs(run: Run) -> None:
    archive.add(failed(), None, [])
    _, out, _ = run("status", "clicks", "--json")
    job = json.loads(out)
    assert job["end_reason"] == "user_error"
    assert job["error"] == "KeyError: 'age'"
    assert job["attempts"][0]["end_reason"] == "lost_node"


def test_the_list_says_why_in_a_word(run: Run) -> None:
    archive.add(failed(), None, [])
    _, out, _ = run("jobs")
    assert "user_error" in out
