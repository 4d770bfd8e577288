"""What interruptions took is kept by type, and counts in the plans of jobs to come."""

import pytest

from protos.decision_pb2 import Resources, ResourceType
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import Attempt, JobStatus, Recovery, RecoveryTimes
from scheduler.runs.recoveries import began_again, measured, seconds_between_cuts, with_times
from scheduler.state.store import Store

SPOT = ResourceType(name="spot", interruptions_per_hour=0.5, recovery_s=600, restart_s=1200)


def job(every: str = "") -> JobSpec:
    spec = JobSpec(name="job")
    spec.train.checkpoint.every = every
    return spec


def offered(*types: ResourceType) -> Resources:
    return Resources(types=[ResourceType(name="cpu", recovery_s=600), *types])


def test_means_are_of_what_was_measured() -> None:
    times = RecoveryTimes()
    for seconds in (0.25, 0.75):
        times = measured(Recovery(seconds=seconds), times)
    assert (times.replaced, times.replaced_s, times.restarted) == (2, 0.5, 0)


def test_a_job_stood_still_longer_than_it_took_to_go_on() -> None:
    times = measured(Recovery(seconds=0.25, stood_s=0.6), RecoveryTimes())
    assert (times.replaced, times.replaced_s) == (1, 0.6)


def test_an_attempt_that_begins_again_counts_what_is_done_twice() -> None:
    status = JobStatus(from_step=60, started_at=1110.0)
    # 80 steps in 160 s, 20 of them after the cut, and 10 s until the next attempt trained.
    status.attempts.append(
        Attempt(number=1, from_step=0, step=80, started_at=940.0, ended_at=1100.0)
    )
    times = began_again(status, RecoveryTimes())
    assert (times.restarted, times.restarted_s) == (1, 10.0 + 20 * 2.0)
    status.attempts[0].started_at = 0.0  # it never trained
    assert began_again(status, RecoveryTimes()).restarted_s == 10.0


def test_what_was_measured_takes_the_place_of_what_the_file_says() -> None:
    times = {"spot": RecoveryTimes(replaced=3, replaced_s=0.2, restarted=1, restarted_s=33.0)}
    found, said = with_times(offered(SPOT), times, job("5m"))
    spot = found.types[1]
    assert (spot.recovery_s, spot.restart_s) == (0.2, 33.0)
    assert found.types[0] == offered().types[0]
    assert len(said) == 1
    assert "200 ms (measured, 3 times), and 33 s (measured, once)" in said[0]


def test_what_was_not_measured_is_the_files_and_half_of_the_time_between_cuts() -> None:
    found, said = with_times(offered(SPOT), {}, job("5m"))
    assert found == offered(SPOT)
    assert said[0].count("(the resources file)") == 2
    bare = ResourceType(name="spot", interruptions_per_hour=0.5, recovery_s=10)
    found, said = with_times(offered(bare), {}, job("5m"))
    assert found.types[1].restart_s == 10 + 150
    assert "half of the time between checkpoints" in said[0]
    found, said = with_times(offered(bare), {}, job())
    assert found.types[1].restart_s == 0
    assert said[1].startswith("The job takes no checkpoints")


def test_types_that_stay_are_left_alone() -> None:
    times = {"cpu": RecoveryTimes(replaced=3, replaced_s=0.2)}
    assert with_times(offered(), times, job("5m")) == (offered(), [])


@pytest.mark.parametrize(
    ("every", "seconds"), [("5m", 300.0), ("30s", 30.0), ("200 steps", 0.0), ("", 0.0)]
)
def test_seconds_between_cuts(every: str, seconds: float) -> None:
    assert seconds_between_cuts(job(every)) == pytest.approx(seconds)


def test_they_are_kept_by_type(store: Store) -> None:
    assert store.recovery_times() == {}
    times = RecoveryTimes(replaced=2, replaced_s=0.5)
    store.put_recovery_times("spot", times)
    store.put_recovery_times("other", RecoveryTimes(restarted=1))
    assert store.recovery_times() == {"spot": times, "other": RecoveryTimes(restarted=1)}
