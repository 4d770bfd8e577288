"""What if: one thing changed, decided again, and told apart."""

import json

import pytest

from scheduler import Decision, InputError, load_resources, load_workload, plan, what_if
from tests.scheduler.instances import EXAMPLE, cost, resources, workload

WORK = load_workload(EXAMPLE / "workload.yaml")
OFFER = load_resources(EXAMPLE / "resources.yaml")
BEFORE = plan(WORK, OFFER, 600_000.0, "exact")


def price_of(name: str) -> float:
    after = what_if(BEFORE, {f"{name}.price": 1.5}).after
    assert after.resources is not None
    return after.resources.types[after.resources.names.index(name)].price_per_hour


def test_a_price() -> None:
    result = what_if(BEFORE, {"v100.price": "1.5"})
    assert result.before is BEFORE
    assert price_of("v100") == 1.5
    assert OFFER.types[2].price_per_hour == 2.42
    assert result.after.cost < BEFORE.cost
    assert result.after.method == "exact"
    fall = result.after.cost / BEFORE.cost - 1
    assert result.differences[0] == (
        f"The cost falls from ${BEFORE.cost:.2f} to ${result.after.cost:.2f} ({fall:+.1%})."
    )


def test_it_is_the_plan_of_the_changed_question() -> None:
    changes = {"t4.limit": "4", "exclude": "v100", "min-throughput": 1e5, "pin.loss": "cpu"}
    after = what_if(BEFORE, changes).after
    offer = OFFER.to_json()
    offer["types"][1]["limit"] = 4
    same = plan(WORK, offer, 1e5, "exact", pin={"loss": "cpu"}, exclude=["v100"])
    assert after.stages == same.stages
    assert after.input_hash == same.input_hash


def test_interruptions_have_the_whole_plan_wait() -> None:
    changes = {"v100.interruptions": "0.1", "v100.recovery": 72, "v100.restart": 720}
    after = what_if(BEFORE, changes).after
    assert "v100" in after.assignment
    spot = [line for line in after.reasons if "is interrupted 0.1 times an hour" in line]
    assert len(spot) == 1
    assert "all units then wait 72" in spot[0]
    lost = [
        0.1 * stage.units * (720 if stage.units == 1 else 72) / 3600
        for stage in after.stages
        if stage.type == "v100"
    ]
    assert after.plan.lost_share == pytest.approx(sum(lost))
    assert after.cost >= BEFORE.cost
    assert after.plan.sustained >= 600_000.0 * (1 - 1e-9)
    assert not any("interrupted" in line for line in BEFORE.reasons)


def test_moves_and_units_are_told() -> None:
    result = what_if(BEFORE, {"exclude": "t4"})
    text = "\n".join(result.differences)
    assert "from t4 to " in text
    assert "The plan takes 0 units of t4 instead of 9." in text
    assert what_if(BEFORE, {"t4.limit": 16}).differences[-1] == "The plan stays the same."


def test_demands_are_set_and_lifted() -> None:
    free = what_if(BEFORE, {"min-throughput": 0}).after
    assert free.min_throughput == 0
    assert free.cost <= BEFORE.cost
    hurried = what_if(BEFORE, {"finish-by": "15m"}).after
    assert hurried.min_throughput == pytest.approx(WORK.samples / 900)
    allowed = what_if(what_if(BEFORE, {"exclude": "t4"}).after, {"allow": "t4"}).after
    assert allowed.excluded == ()
    assert allowed.cost == pytest.approx(BEFORE.cost)


def test_a_deadline_stays_one() -> None:
    layer = {"cpu": cost(1.0), "spot": cost(1.0)}
    offer = resources(cpu=(1.0, 10), spot=(0.1, 40))
    offer["types"][1].update(interruptions_per_hour=0.5, recovery_s=1.0)
    before = plan(workload(layer), offer, None, "exact", finish_by=1.2)
    assert before.assignment == ("spot",)
    same = what_if(Decision.from_json(before.to_json(inputs=True)), {"spot.price": 0.1}).after
    assert (same.stages, same.input_hash) == (before.stages, before.input_hash)
    # Without these, nothing would make up for what is lost.
    refused = what_if(before, {"cpu.limit": 8}).after
    assert refused.plan.reason.startswith("finish_by: units that are never taken away")
    assert not what_if(refused, {"spot.price": 0.05}).after.feasible
    assert what_if(refused, {"finish-by": 2}).after.feasible
    assert what_if(refused, {"finish-by": 0}).after.feasible
    assert not what_if(refused, {"min-throughput": 0}).after.feasible
    floor = plan(workload(layer), offer, before.min_throughput, "exact")
    assert floor.input_hash != before.input_hash
    assert what_if(floor, {"cpu.limit": 8}).after.feasible


def test_what_is_no_longer_possible_says_so() -> None:
    result = what_if(BEFORE, {"min_throughput": 9e6})
    assert not result.after.feasible
    assert result.differences[0].startswith("No plan meets the demands any more: no plan reaches")
    back = what_if(result.after, {"floor": "1e5"})
    assert back.differences[0].startswith("A plan now meets the demands: $")


def test_json() -> None:
    value = json.loads(json.dumps(what_if(BEFORE, {"v100.price": 3}).to_json(), allow_nan=False))
    assert value["changes"] == {"v100.price": 3}
    assert value["before"]["method"] == value["after"]["method"] == "exact"
    assert value["differences"]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("v100.prise", 1, "v100.prise: unknown key; did you mean 'price'?"),
        ("v10.price", 1, "v10.price: unknown key; did you mean 'v100.price'?"),
        ("speed", 1, "speed: unknown key; valid: TYPE.price"),
        ("v100.price", "cheap", "v100.price: 'cheap': expected a finite number of at least 0"),
        ("v100.price", -1, "v100.price: -1: expected a finite number of at least 0"),
        ("v100.price", "nan", "v100.price: nan: expected a finite number"),
        ("t4.limit", 0, "t4.limit: 0: expected a whole number from 1"),
        ("t4.limit", "2.5", "t4.limit: 2.5: expected a whole number from 1"),
        ("min-throughput", "inf", "min-throughput: inf: expected a finite number"),
        ("max-price", "-1", "max-price: -1.0: expected a finite number"),
        ("finish-by", "soon", "finish-by: 'soon': expected hours"),
        ("exclude", "t5", "exclude: 't5': expected a type on offer; did you mean 't4'?"),
        ("allow", "t4", "allow: 't4': expected an excluded type; there is none"),
        ("pin.lose", "cpu", "pin.lose: 'lose': expected a layer; did you mean 'loss'?"),
        ("pin.loss", "tpu", "pin.loss: 'tpu': expected a type on offer"),
    ],
)
def test_unknown_keys_and_bad_values_are_refused(key: str, value: float | str, says: str) -> None:
    with pytest.raises(InputError) as error:
        what_if(BEFORE, {key: value})
    assert says in str(error.value)
