"""Records, JSON and messages: flat and derived fields, infinities, and what is refused."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from protos import decision_pb2 as pb
from scheduler.decision.record import TrainingPoint
from scheduler.problem import mapper
from scheduler.problem.fields import InputError
from scheduler.problem.plan import PlanStage


@dataclass(frozen=True)
class Figures:
    cost: float
    units: tuple[int, ...] = ()


@dataclass(frozen=True)
class Record:
    name: str
    figures: Figures = field(metadata=mapper.FLAT)
    proven: bool
    shares: Mapping[str, float] = field(default_factory=dict)
    other: Figures | None = None
    source: str = field(default="", compare=False)

    DERIVED: ClassVar = ("gap",)


RECORD = Record("a", Figures(math.inf, (1, 2)), True, {"cpu": 0.5}, Figures(1.0), "a file")
JSON = {
    "name": "a",
    "cost": None,
    "units": [1, 2],
    "proven": True,
    "shares": {"cpu": 0.5},
    "other": {"cost": 1.0, "units": []},
}


def test_a_flat_record_stands_among_its_owners_fields() -> None:
    found = mapper.to_json(RECORD)
    assert found == JSON
    assert list(found) == list(JSON)
    assert mapper.from_json(Record, found) == RECORD


@dataclass(frozen=True)
class Step:
    cost: float
    staleness: int | None = field(default=None, metadata=mapper.OPTIONAL)
    overhead: float = field(default=0.0, metadata=mapper.OPTIONAL)


def test_an_optional_field_is_left_out_where_it_holds_its_default() -> None:
    assert mapper.to_json(Step(1.0)) == mapper.to_fields(Step(1.0)) == {"cost": 1.0}
    assert mapper.to_json(Step(1.0, 0, 0.5)) == {"cost": 1.0, "staleness": 0, "overhead": 0.5}
    for step in (Step(1.0), Step(1.0, 0, 0.5)):
        assert mapper.from_json(Step, mapper.to_json(step)) == step


def test_fields_of_a_message_keep_infinities() -> None:
    assert mapper.to_fields(RECORD)["cost"] == math.inf
    assert mapper.to_fields(RECORD, ("shares", "other")).keys() == JSON.keys() - {"shares", "other"}


def test_what_is_derived_is_not_read_and_defaults_need_not_be_there() -> None:
    found = mapper.from_json(Record, {"name": "b", "cost": 2, "proven": False, "gap": 0.1})
    assert found == Record("b", Figures(2.0), False)


def test_what_has_been_read_already_is_taken() -> None:
    value = {key: item for key, item in JSON.items() if key != "shares"}
    assert mapper.from_fields(Record, value, shares={"cpu": 0.5}) == RECORD


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cost": "dear"}, "file: cost: 'dear': expected a finite number, or null"),
        ({"cost": math.nan}, "file: cost: nan: expected a finite number"),
        ({"cost": math.inf}, "file: cost: inf: expected a finite number, or null"),
        ({"shares": {"cpu": -math.inf}}, "file: shares.cpu: -inf: expected a finite number"),
        ({"units": [1, -1]}, "file: units[1]: -1: expected a whole number of at least 0"),
        ({"units": 3}, "file: units: 3: expected a list"),
        ({"proven": 1}, "file: proven: 1: expected true or false"),
        ({"shares": [1]}, "file: shares: [1]: expected a mapping"),
        ({"other": {"units": []}}, "file: other.cost: missing; expected a finite number"),
        ({"costs": 1}, "file: costs: unknown key; did you mean 'cost'?"),
        ({"figures": {}}, "file: figures: unknown key"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as caught:
        mapper.from_json(Record, {**JSON, **change}, "file")
    assert str(caught.value).startswith(said)


def test_a_message_is_read_as_json_is_but_for_numbers_that_are_not_finite() -> None:
    stage = PlanStage(0, 3, "cpu", 2, 0.25, math.inf, 1e9, True)
    message = pb.PlanStage(**mapper.to_fields(stage))
    assert mapper.from_fields(PlanStage, mapper.of_message(message)) == stage
    point = TrainingPoint(3, math.nan, -math.inf)
    message_of_point = pb.TrainingPoint(**mapper.to_fields(point))
    again = mapper.from_fields(TrainingPoint, mapper.of_message(message_of_point))
    assert math.isnan(again.mean_reward)
    assert again.best_cost == -math.inf
    decision = mapper.of_message(pb.Decision(stages=[message], pin={"b": "cpu", "a": "t4"}))
    assert decision["stages"] == [mapper.to_fields(stage) | {"threads": 0}]
    assert list(decision["pin"]) == ["a", "b"]
    assert decision["measured"] is None
    assert "pin" not in mapper.of_message(pb.Decision(), ("pin",))
