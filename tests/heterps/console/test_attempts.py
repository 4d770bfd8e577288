"""The attempts of a job on its page: what was lost, and where each began on the curves."""

from heterps.client.records import Job
from heterps.console.pages.history import History
from heterps.console.pages.job import job_sections
from protos import scheduler_pb2 as pb
from protos.history_pb2 import JobHistory


def history() -> JobHistory:
    """Two attempts, a report every 5 steps and seconds; the second one begins at step 20."""
    made = JobHistory()
    stage = made.stages.add()
    for attempt, steps in ((1, range(0, 31, 5)), (2, range(20, 41, 5))):
        for step in steps:
            seconds = float(step - (20 if attempt == 2 else 0))
            stage.points.add(
                attempt=attempt,
                phase="train",
                step=step,
                samples=step * 16,
                loss=1.0 - step / 100,
                train_seconds=seconds,
                busy_s=seconds / 2,
            )
    return made


def job() -> Job:
    status = pb.JobStatus(
        job_id="job", state=pb.RUNNING, attempt=2, from_step=20, from_samples=320, step=40
    )
    status.attempts.add(
        number=1,
        end_reason=pb.END_WORKER_CRASHED,
        step=30,
        started_at=1e9,
        ended_at=1e9 + 30,
        price_per_hour=3.6,
    )
    status.started_at, status.ended_at = 1e9 + 42, 1e9 + 62
    status.cuts.add(
        step=20, taken_at=1e9, seconds=0.5, stall_s=0.01, bytes=2048, place="/o.cuts/20"
    )
    return Job.of(status)


def test_time_in_training_goes_on_over_attempts() -> None:
    found = History.of(history())
    assert [(run.attempt, run.began_s, run.end_s) for run in found.runs] == [
        (1, 0, 30),
        (2, 30, 50),
    ]
    times = [at for at, _ in found.losses]
    assert times == sorted(times), "the curve never goes back"
    assert {round(value) for _, value in found.rates} == {16}, "a restart is no pace"
    assert found.utilisation(0) == (0.5, 0.5)


def test_the_page_tells_what_was_lost_and_marks_where_an_attempt_began() -> None:
    made = history()
    for attempt, measured in ((1, 12.0), (2, 0.0)):
        used = made.plans.add(attempt=attempt, from_step=20 * (attempt - 1), reason="planned")
        used.decision.stages.add(units=3, type="t4")
        used.decision.throughput, used.decision.measured.throughput = 17.0, measured
    page = str("".join(map(str, job_sections(job(), None, History.of(made), []))))
    for part in (
        *("Plans", "3 t4", ">17<", ">12<"),
        *("worker_crashed", "10 s", "$0.01", "12 s"),  # lost, its cost, until it trained again
        *("attempt 2 from step 20", "At 0:30: attempt 2 from step 20."),
        *("Checkpoints", "2.0 kB", "/o.cuts/20", "heterps submit --resume job@STEP"),
    ):
        assert part in page, part


def test_a_job_that_went_back_within_an_attempt_shows_where_and_what_it_lost() -> None:
    made = JobHistory()
    for stage in range(2):  # of one stage at first, then of two
        points = made.stages.add(stage=stage).points
        for generation, steps in ((0, range(0, 31, 5)), (1, range(20, 41, 5))):
            if stage > generation:
                continue
            for step in steps:
                seconds = float(step - (20 if generation else 0))
                points.add(
                    attempt=1,
                    generation=generation,
                    at=1e9 + step + 20 * generation,
                    step=step,
                    samples=step * 16,
                    loss=0.5 if stage else 0.0,
                    train_seconds=seconds,
                )
    found = History.of(made)
    assert [(run.generation, run.began_s, run.end_s) for run in found.runs] == [
        (0, 0, 30),
        (1, 30, 50),
    ]
    status = pb.JobStatus(job_id="job", state=pb.RUNNING, attempt=1, step=40)
    status.recoveries.add(
        at=1e9 + 31,
        lost=["stage 0 worker 0"],
        seconds=2,
        step=20,
        attempt=1,
        back=True,
        reached=31,
        lost_s=10,
        price_per_hour=360,
        reason="it was killed",
    )
    page = str("".join(map(str, job_sections(Job.of(status), None, found, []))))
    for part in ("stage 0 worker 0", "it was killed", "11", "$1.00", "replaced, from step 20"):
        assert part in page, part
