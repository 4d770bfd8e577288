"""Workers that are killed while a model or a checkpoint is written; the result is the same."""

import os
import signal

import pytest

from protos.scheduler_pb2 import END_SUCCEEDED, END_WORKER_CRASHED, JobStatus
from tests.scheduler.runs.survivors import ALONE, SHAPE, Service, plan, trains
from tests.waiting import wait_until

pytest.importorskip("workers.stage")
LEADER = 1, 0


def ended(service: Service, name: str, *deaths: tuple[str, int, int], **more: object) -> JobStatus:
    """How a job ended whose workers die, of a stage and rank each: in its only attempt."""
    fault = {"model.entry": "fault.py:dies", "model.args.deaths": [list(one) for one in deaths]}
    spec = service.job(name, **fault, **more)
    spec.retries = 1
    status = service.end(service.submit(spec))
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    assert status.step == SHAPE.steps
    assert status.output
    folder = service.directory / "out" / name
    assert not folder.with_name(f"{name}.partial").exists()
    return status


@pytest.mark.parametrize(
    "when",
    [
        "tables are saved",
        *(
            pytest.param(when, marks=pytest.mark.exhaustive)
            for when in (
                "training is over",
                "its weights are written",
                "tables are to be saved",
                "pushes are held",
                "the model has its name",
            )
        ),
    ],
)
def test_who_saves_the_model_is_replaced(service: Service, unfailed: str, when: str) -> None:
    """The others have trained and wait: one of its stage has the state."""
    name = f"leader-{when.replace(' ', '-')}"
    status = ended(service, name, (when, *LEADER))
    (recovery,) = status.recoveries
    assert list(recovery.lost) == ["stage 1 worker 0"]
    assert (recovery.back, recovery.step) == (False, SHAPE.steps)
    assert service.digest(name) == unfailed
    measured = plan(service, name).measured
    assert measured.throughput == pytest.approx(status.samples / measured.seconds)
    assert not measured.stage_s, "those who saved it have trained nothing"


@pytest.mark.exhaustive
def test_nothing_is_left_of_a_model_whose_job_ends_as_it_is_saved(service: Service) -> None:
    fault = {"model.entry": "fault.py:dies", "model.args.deaths": [["tables are saved", *LEADER]]}
    status = service.end(service.submit(service.job("without-retries", **fault, **ALONE)))
    assert status.end_reason == END_WORKER_CRASHED, status.reason
    assert [path.name for path in (service.directory / "out").glob("*without-retries*")] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "rank"), [(0, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("when", ["training is over", "its weights are written"])
def test_another_that_has_not_given_all_is_replaced(
    service: Service, unfailed: str, when: str, stage: int, rank: int
) -> None:
    name = f"{when.replace(' ', '-')}-{stage}-{rank}"
    status = ended(service, name, (when, stage, rank))
    assert len(status.recoveries) == 1
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
@pytest.mark.parametrize("victims", [((0, 1),), ((0, 0), (0, 1), (1, 1))])
def test_who_has_trained_is_not_missed(
    service: Service, unfailed: str, victims: tuple[tuple[int, int], ...]
) -> None:
    name = f"trained-{len(victims)}"
    status = ended(service, name, *(("it has trained", *one) for one in victims))
    assert not status.recoveries
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
@pytest.mark.parametrize("also", [(0, 1), (1, 1)])
def test_who_has_trained_is_replaced_with_who_saves(
    service: Service, unfailed: str, also: tuple[int, int]
) -> None:
    """Where the whole stage is gone, all go back."""
    name = f"trained-and-saves-{also[0]}"
    status = ended(service, name, ("it has trained", *also), ("tables are saved", *LEADER))
    (recovery,) = status.recoveries
    assert len(recovery.lost) == 2
    assert recovery.back == (also[0] == 1)
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
@pytest.mark.parametrize("every", ["5 steps", ""])
def test_the_only_worker_of_the_last_stage_takes_all_back(service: Service, every: str) -> None:
    name = f"alone-saves-{every[:1] or 'never'}"
    whole = f"{name}-unfailed"
    assert service.end(service.submit(service.job(whole, **ALONE))).end_reason == END_SUCCEEDED
    cuts = {"train.checkpoint.every": every} if every else {}
    status = ended(service, name, ("tables are saved", *LEADER), **ALONE, **cuts)
    (recovery,) = status.recoveries
    assert recovery.back
    assert recovery.step == (25 if every else 0)
    assert recovery.step <= recovery.reached <= SHAPE.steps
    assert service.digest(name) == service.digest(whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("when", "stage"),
    [
        ("a part of a cut is written", 0),
        ("a part of a cut is written", 1),
        ("a cut begins", 0),
        ("pushes are held", 0),
        ("a cut lacks its name", 0),
    ],
)
def test_who_writes_a_cut_is_replaced(
    service: Service, unfailed: str, when: str, stage: int
) -> None:
    name = f"{when.replace(' ', '-')}-{stage}"
    status = ended(service, name, (when, stage, 0), **{"train.checkpoint.every": "9 steps"})
    (recovery,) = status.recoveries
    assert list(recovery.lost) == [f"stage {stage} worker 0"]
    assert not recovery.back
    assert [cut.step for cut in status.cuts][-1] == 18, "the next one is taken"
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_no_replacement_of_a_round_that_failed_is_left(service: Service, unfailed: str) -> None:
    """One of two dies as it starts; the other had begun to listen."""
    spec = service.may_be_held("two-rounds", **{"model.entry": "fault.py:one_dies"})
    spec.retries = 2
    name = service.submit(spec)
    with service.held():
        trains(service, name, 4)
        pids = service.pids(name)
        for victim in ("stage 0 worker 1", "stage 1 worker 0"):
            os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: service.recovered(name), "they are replaced")
        wait_until(lambda: len(service.pids(name)) == len(pids), "nobody else is left")
        left = service.pids(name)
    labels = ("stage 0 worker 1", "stage 1 worker 0")
    assert {f"{label}, generation 2" for label in labels} <= {*left}
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    assert service.digest(name) == unfailed
