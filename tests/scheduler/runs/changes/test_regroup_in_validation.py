"""Workers that are killed while held-out data is measured; the result is the same."""

import json
from typing import Any

import pytest

from protos.scheduler_pb2 import END_SUCCEEDED
from tests.scheduler.runs.survivors import Service, move, plan, trains

pytest.importorskip("workers.stage")
_EVERY_3 = {
    "data.valid": "train.csv",
    "train.validate.every": "3 steps",
    "train.validate.metric": "valid_auc",
    "train.validate.patience": 2,
    "train.optimizer.learning_rate": 0.3,  # it gets worse soon
}


def facts(service: Service, name: str) -> dict[str, Any]:
    """What the saved model says of its validations."""
    path = service.directory / "out" / name / "model.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return {key: found[key] for key in ("best_step", "steps", "samples", "validated", "metrics")}


def trained(service: Service, staleness: int) -> str:
    """A job that nothing happens to."""
    name = f"validated-{staleness}"
    if not (service.directory / "out" / name).exists():
        job = service.job(name, **_EVERY_3, **{"train.staleness": staleness})
        status = service.end(service.submit(job))
        assert status.end_reason == END_SUCCEEDED, status.reason
        found = facts(service, name)
        assert 0 < found["best_step"] < found["steps"] < 27, "one that shows something"
    return name


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("when", "stage", "rank"),
    [
        ("a validation begins", 0, 0),
        ("a validation begins", 0, 1),
        ("a validation begins", 1, 0),
        ("a validation is over", 0, 0),
        ("a validation is over", 0, 1),
        ("a validation is over", 1, 1),
        ("the best is to be kept", 0, 0),
        ("the best is to be kept", 1, 0),
        ("the best is to be kept", 1, 1),
        ("the best is written", 0, 0),
        ("the best is to be the model", 0, 0),
        ("the best is to be the model", 1, 0),
    ],
)
def test_who_validates_is_replaced(
    service: Service, when: str, stage: int, rank: int, staleness: int
) -> None:
    """Nothing that was measured is lost, or counts twice."""
    whole = trained(service, staleness)
    name = f"{when.replace(' ', '-')}-{stage}-{rank}-{staleness}"
    fault = {"model.entry": "fault.py:dies", "model.args.deaths": [[when, stage, rank]]}
    spec = service.job(name, **fault, **_EVERY_3, **{"train.staleness": staleness})
    spec.retries = 1
    status = service.end(service.submit(spec))
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    (recovery,) = status.recoveries
    assert list(recovery.lost) == [f"stage {stage} worker {rank}"]
    if staleness:  # rows of the steps that are done again have seen other updates
        assert facts(service, name)["steps"] >= facts(service, whole)["best_step"]
    else:
        assert facts(service, name) == facts(service, whole)
        assert service.digest(name) == service.digest(whole)


@pytest.mark.exhaustive
def test_the_best_is_the_model_after_all_went_back(service: Service) -> None:
    """The only worker of the last stage dies when the best is to be the model."""
    alone = _EVERY_3 | {"schedule.min_throughput": 400}
    whole = service.submit(service.job("validated-alone", **alone))
    assert service.end(whole).end_reason == END_SUCCEEDED
    fault = {"model.entry": "fault.py:dies"}
    fault["model.args.deaths"] = [["the best is to be the model", 1, 0]]
    spec = service.job("validated-back", **fault, **alone)
    spec.retries = 1
    status = service.end(service.submit(spec))
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    (recovery,) = status.recoveries
    assert recovery.back
    assert facts(service, "validated-back") == facts(service, whole)
    assert service.digest("validated-back") == service.digest(whole)


@pytest.mark.exhaustive
def test_a_job_that_moves_between_validations_has_the_same_ones(service: Service) -> None:
    """What was measured before counts on, under the plan that it goes over to."""
    metric = "valid_logloss"  # of an AUC, roundings decide between samples with the same inputs
    longer = {key: value for key, value in _EVERY_3.items() if key.startswith("train.validate.")}
    longer |= {"data.valid": "train.csv", "train.validate.metric": metric, "train.max_steps": 90}
    longer |= {"train.validate.patience": 0}
    # A bias before a normalisation has a gradient of 0, which Adam would make steps of.
    longer["train.optimizer.eps"] = 1e-4
    whole = service.submit(service.job("validated-unmoved", **longer))
    assert service.end(whole).end_reason == END_SUCCEEDED
    name = service.submit(service.may_be_held("validated-moved", **longer))
    trains(service, name, 4)
    (moved,) = move(service, name, plan(service, name, (0, 2, "front", 2), (3, 3, "back", 1))).moves
    assert not moved.failed, moved.failed
    assert service.end(name).end_reason == END_SUCCEEDED
    found, expected = facts(service, name), facts(service, whole)
    steps = [one["step"] for one in found["validated"]]
    assert steps == [one["step"] for one in expected["validated"]]
    assert steps[0] < moved.step < steps[-1], "one that shows something"
    for one, other in zip(found["validated"], expected["validated"], strict=True):
        assert one["metrics"][metric] == pytest.approx(other["metrics"][metric], rel=1e-6)
    for key in ("best_step", "steps", "samples"):
        assert found[key] == expected[key]
    assert found["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-6)
