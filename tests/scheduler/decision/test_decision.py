"""A decision survives messages, JSON and files whole, and a wrong file is refused by key."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler
from protos import decision_pb2 as pb
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import QUEUED, JobStatus
from scheduler.decision.record import (
    Alternative,
    Decision,
    Measured,
    ParetoPoint,
    Relaxation,
    TrainingPoint,
)
from scheduler.problem.fields import InputError
from scheduler.state.store import Store

EXAMPLE = Path(__file__).parents[3] / "examples" / "plan"


def planned(floor: float = 100_000.0) -> Decision:
    workload = scheduler.load_workload(EXAMPLE / "workload.yaml")
    resources = scheduler.load_resources(EXAMPLE / "resources.yaml")
    return scheduler.plan(workload, resources, floor, method="greedy")


FIRST = planned()
IMPOSSIBLE = planned(1e12)

numbers = st.floats(min_value=0, allow_infinity=False, allow_nan=False)
unbounded = st.floats(min_value=0, allow_nan=False)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@st.composite
def decisions(draw: st.DrawFn) -> Decision:
    """A real plan with everything around it drawn."""
    base = draw(st.sampled_from([FIRST, IMPOSSIBLE]))
    layers = [layer.name for layer in base.workload.layers]
    types = base.resources.names
    with_values = draw(st.booleans())
    plans = st.builds(Alternative, names, st.just(base.plan), numbers, st.integers(0, 2**40))
    return replace(
        base,
        plan=replace(
            base.plan,
            cost=draw(unbounded),
            micro_batches=draw(st.integers(0, 64)),
            staleness=draw(st.none() | st.integers(0, 3)),
        ),
        gap=draw(unbounded),
        lower_bound=draw(unbounded),
        seconds=draw(numbers),
        seed=draw(st.integers(0, 2**32 - 1)),
        alternatives=tuple(draw(st.lists(plans, max_size=2))),
        probabilities={layer: {kind: draw(numbers) for kind in types} for layer in layers},
        values={layer: draw(st.floats(-9, -1)) for layer in layers} if with_values else {},
        training=tuple(
            draw(st.lists(st.builds(TrainingPoint, st.integers(0, 9), numbers, unbounded)))
        ),
        pareto=tuple(
            ParetoPoint(*draw(st.tuples(numbers, numbers, numbers)), base.assignment, proven)
            for proven in draw(st.lists(st.booleans(), max_size=2))
        ),
        relaxations=tuple(
            Relaxation(key, *draw(st.tuples(numbers, unbounded, numbers, numbers, numbers)))
            for key in draw(st.lists(names, max_size=2))
        ),
        measured=draw(
            st.none()
            | st.builds(
                Measured,
                *[numbers] * 4,
                st.booleans(),
                st.just((1.0, 2.0)),
                numbers,
                st.integers(0, 2**40),
            )
        ),
        overhead=draw(st.floats(0, 0.9)),
        pin=draw(st.dictionaries(names, names, max_size=2)),
        excluded=tuple(draw(st.lists(names, max_size=2))),
        reasons=tuple(draw(st.lists(names, max_size=2))),
        proven=draw(st.booleans()),
        versions=draw(st.dictionaries(names, names, max_size=2)),
        created_at=draw(numbers),
    )


@settings(max_examples=60)
@given(decisions())
def test_json_keeps_everything(decision: Decision) -> None:
    text = json.dumps(decision.to_json(inputs=True), allow_nan=False)
    assert Decision.from_json(json.loads(text)) == decision


@settings(max_examples=60)
@given(decisions())
def test_a_message_keeps_everything(decision: Decision) -> None:
    message = pb.Decision.FromString(decision.to_message().SerializeToString())
    assert Decision.from_message(message) == decision


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "decision.json"
    for decision in (FIRST, IMPOSSIBLE):
        decision.export(path)
        assert Decision.load(path) == decision
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match=r"nowhere.*cannot be written"):
        FIRST.export(tmp_path / "nowhere" / "decision.json")


def test_json_without_inputs_is_still_a_decision() -> None:
    value = FIRST.to_json()
    assert "workload" not in value
    assert Decision.from_json(value) == replace(FIRST, workload=None, resources=None)


def test_infinite_is_null() -> None:
    value = IMPOSSIBLE.to_json()
    assert value["gap"] is None
    assert Decision.from_json(value).gap == math.inf


def test_slack_is_the_share_of_waiting() -> None:
    slowest = max(stage.busy_s for stage in FIRST.stages)
    for stage, slack, written in zip(
        FIRST.stages, FIRST.slack, FIRST.to_json()["stages"], strict=True
    ):
        assert slack == written["slack"] == pytest.approx(1 - stage.busy_s / slowest)
        assert (slack == 0) == stage.bottleneck


def ran(steps: int, throughput: float, **change: object) -> Decision:
    """The first decision after a run."""
    busy = tuple(1.1 * stage.compute_s for stage in FIRST.stages)
    measured = Measured(9e4, 1.0, 1.0, 60.0, False, busy, throughput, steps)
    return replace(FIRST, measured=measured, **change)


def test_a_floor_is_met_by_the_mean_of_a_hundred_steady_steps() -> None:
    assert FIRST.floor_met is None
    assert ran(100, 100_000.0).floor_met is True
    assert ran(100, 99_999.0).floor_met is False
    assert ran(99, 200_000.0).floor_met is None
    assert ran(100, 1.0, min_throughput=0.0).floor_met is None
    assert ran(100, 99_999.0).to_json()["floor_met"] is False
    assert "floor_met" not in FIRST.to_json()


def test_each_stage_has_the_error_of_its_prediction_but_for_emulated_ones() -> None:
    assert FIRST.stage_errors == (None,) * len(FIRST.stages)
    found = ran(100, 1.0)
    assert found.stage_errors == pytest.approx((0.1,) * len(FIRST.stages))
    assert found.to_json()["stages"][0]["error"] == pytest.approx(0.1)
    kinds = [replace(kind, emulated=kind.name == "cpu") for kind in FIRST.resources.types]
    some = replace(found, resources=replace(FIRST.resources, types=tuple(kinds)))
    for stage, error in zip(some.stages, some.stage_errors, strict=True):
        assert (error is None) == (stage.type == "cpu")


def test_total_units_count_the_parameter_servers() -> None:
    prices = {kind.name: kind.price_per_hour for kind in FIRST.resources.types}
    total = sum(prices[name] * units for name, units in FIRST.total_units.items())
    assert FIRST.plan.ps_units > 0
    assert total == pytest.approx(FIRST.plan.price_per_hour)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("cost", "cheap", "cost: 'cheap': expected a finite number"),
        ("cost", float("nan"), "cost: nan: expected a finite number"),
        ("cost", float("-inf"), "cost: -inf: expected a finite number, or null"),
        ("feasible", 1, "feasible: 1: expected true or false"),
        ("method", None, "method: None: expected text"),
        ("seed", -1, "seed: -1: expected a whole number"),
        ("stages", {}, "stages: {}: expected a list"),
        ("assignment", ["cpu"], "assignment: 1 types: expected a type for each of the 10 layers"),
        ("pin", ["cpu"], "pin: ['cpu']: expected a mapping"),
        ("stagess", [], "stagess: unknown key; did you mean 'stages'?"),
    ],
)
def test_a_wrong_file_names_key_value_and_what_was_expected(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**FIRST.to_json(inputs=True), key: value}))
    with pytest.raises(InputError) as caught:
        Decision.load(path)
    assert str(caught.value).startswith(f"{path}: {said}")


def test_stages_must_cover_the_layers_with_types_on_offer() -> None:
    value = FIRST.to_json(inputs=True)
    first = value["stages"][0]
    with pytest.raises(InputError, match=r"stages\[0\]: layers 1 to .*: expected layers from 0"):
        Decision.from_json({**value, "stages": [{**first, "first": 1}]})
    with pytest.raises(InputError, match=r"stages: end before layer 9"):
        Decision.from_json({**value, "stages": [first]})
    with pytest.raises(InputError, match=r"stages\[0\].type: 'tpu': expected one of cpu, t4, v100"):
        Decision.from_json({**value, "stages": [{**first, "type": "tpu"}]})
    with pytest.raises(InputError, match="method: missing"):
        Decision.from_json({key: item for key, item in value.items() if key != "method"})


def test_the_store_gives_the_decisions_of_jobs_in_their_order(store: Store) -> None:
    assert store.decisions([]) == {}
    for number in range(5):
        status = JobStatus(job_id=f"j{number}", name="clicks", state=QUEUED)
        store.submit(status, JobSpec())
        if number != 2:
            store.put_decision(f"j{number}", replace(FIRST, seed=number).to_message())
    found = store.decisions([f"j{number}" for number in range(6)])
    assert list(found) == ["j0", "j1", "j3", "j4"]
    assert [decision.seed for decision in found.values()] == [0, 1, 3, 4]
    assert list(store.decisions(["j2", "j4", "j3"])) == ["j4", "j3"]
