"""Types that leave open how many threads workers have: cut, and planned as trying all would."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from protos.decision_pb2 import ResourceType as Message
from scheduler import InputError, Resources, Workload, pareto, plan
from scheduler.problem.mapper import of_message, to_fields
from scheduler.problem.threads import choices, cut, cut_message, node_units
from tests.scheduler.instances import cost, resources, workload


def _open(*numbers: int, limit: int = 8) -> dict[str, Any]:
    offer = resources(cpu=(0.04, limit), gpu=(1.0, 2))
    more = {"flops_per_s": 5e10, "memory_bandwidth": 1e9, "units_per_host": 5, "recovery_s": 3.0}
    offer["types"][0] |= {"threads_any": list(numbers)} | more
    return offer


def test_a_unit_of_several_cores_costs_and_holds_so_many_times_as_much() -> None:
    offer, work = Resources.parse(_open(1, 2, 4)), workload({"cpu": cost(1.0)})
    plain, gpu = cut(offer, Workload.parse(work)).types
    assert plain == replace(offer.types[0], threads_any=())
    assert (plain.limit, plain.price_per_hour, plain.threads_any) == (8, 0.04, ())
    of_four = Workload.parse(work | {"threads": {"cpu": 4}})
    four, same = cut(offer, of_four).types
    assert gpu == same == offer.types[1]
    assert (four.threads, four.cores, four.node_units, four.limit) == (4, 4, 4, 2)
    assert (four.price_per_hour, four.memory_bytes) == pytest.approx((0.16, 400.0))
    assert (four.flops_per_s, four.memory_bandwidth) == pytest.approx((2e11, 4e9))
    assert (four.units_per_host, four.recovery_s, four.threads_any) == (1, 3.0, ())
    assert cut(Resources((four, gpu)), of_four).types == (four, gpu)  # nothing is open any more
    message = Message(**to_fields(offer.types[0]))
    cut_message(message, 4)
    assert of_message(message) == of_message(Message(**to_fields(four)))
    assert node_units([message]) == {"cpu": 4}
    cut_message(message := Message(**to_fields(offer.types[0])), 1)
    assert of_message(message) == of_message(Message(**to_fields(plain)))
    assert not node_units([message])


def test_numbers_are_those_of_the_list_each_once() -> None:
    kinds = [Message(name="gpu"), Message(name="cpu", threads_any=[2, 1, 2])]
    assert choices(kinds) == [{"cpu": 2}, {"cpu": 1}]
    assert choices(kinds[:1]) == [{}]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threads_any": [0]}, "threads_any: [0]: expected whole numbers from 1 to 1024"),
        ({"threads_any": [1, 2.5]}, "threads_any: [1, 2.5]: expected whole numbers"),
        ({"threads_any": [True]}, "threads_any: [True]: expected whole numbers"),
        ({"threads_any": 2}, "threads_any: 2: expected a list"),
        ({"threads_any": [2], "threads": 2}, "expected a CPU type, device: cpu, without threads"),
        ({"threads_any": [2], "device": "cuda"}, "expected a CPU type"),
        ({"node_units": 2}, "node_units: 2: expected as many as threads"),
    ],
)
def test_a_bad_list_is_refused(change: dict[str, Any], says: str) -> None:
    offer = resources(cpu=(0.04, 8))
    offer["types"][0] |= change
    with pytest.raises(InputError) as caught:
        Resources.parse(offer, "r.yaml")
    assert says in str(caught.value)
    two = resources(cpu=(0.04, 8), cpu2=(0.04, 8))
    for kind in two["types"]:
        kind["threads_any"] = [1, 2]
    with pytest.raises(InputError, match="expected at most one type with it"):
        Resources.parse(two)


def test_the_curve_is_of_the_units_that_a_plan_has() -> None:
    work, offer = workload({"cpu": cost(1.0)}, threads={"cpu": 4}), _open(1, 4)
    decision = plan(work, offer, method="exact", pareto=True)
    assert pareto(work, offer) == decision.pareto
    with pytest.raises(InputError, match=r"threads.cpu: .* with 1: expected 2 or 4"):
        pareto(workload({"cpu": cost(1.0)}), _open(2, 4))


def test_costs_of_a_number_that_is_not_in_the_list_are_refused() -> None:
    work = workload({"cpu": cost(1.0)})
    with pytest.raises(
        InputError, match=r"threads\.cpu: the costs are of a worker with 1: expected 2"
    ):
        plan(work, _open(2, 4))
    with pytest.raises(InputError, match=r"threads\.cpu: 4: expected at most the limit, 3 cores"):
        plan(work | {"threads": {"cpu": 4}}, _open(2, 4, limit=3))
    with pytest.raises(InputError, match=r"threads\.cpu: 8: expected at most a host's, 5 cores"):
        plan(work | {"threads": {"cpu": 8}}, _open(2, 8, limit=16))
    decision = plan(work | {"threads": {"cpu": 2}}, _open(1, 2))
    assert [stage.threads for stage in decision.stages] == [2]
    assert Resources.parse(decision.resources.to_json()) == decision.resources


def _cheapest(
    works: dict[int, dict[str, Any]], limit: int, floor: float, ps_core_s: float
) -> tuple[float, int]:
    """Dollars a sample and threads of the best plan, by trying all in cores: (inf, 0) for none."""
    best = (math.inf, 0)
    for threads, work in works.items():
        layers = [layer["cost"] for layer in work["layers"]]
        for kinds in itertools.product(("cpu", "gpu"), repeat=len(layers)):
            runs = [
                list(group) for _, group in itertools.groupby(range(len(layers)), kinds.__getitem__)
            ]
            for units in itertools.product(range(1, limit + 1), repeat=len(runs)):
                busy = []
                for number, (run, k) in enumerate(zip(runs, units, strict=True)):
                    own = [layers[n][kinds[n]] for n in run]
                    a = sum(
                        c["compute_s"] * (1 - c["parallel_compute"] + c["parallel_compute"] / k)
                        for c in own
                    )
                    b = sum(
                        c["sync_s"] * (1 - c["parallel_sync"] + c["parallel_sync"] / k) for c in own
                    )
                    if number < len(runs) - 1:
                        last = own[-1]
                        b += last["transfer_s"] * (
                            1 - last["parallel_sync"] + last["parallel_sync"] / k
                        )
                    busy.append(max(a, b) / 100)
                rate = 1 / max(busy)
                cores = sum(
                    threads * k
                    for run, k in zip(runs, units, strict=True)
                    if kinds[run[0]] == "cpu"
                )
                cores += threads * math.ceil(rate * ps_core_s / threads)
                gpus = sum(k for run, k in zip(runs, units, strict=True) if kinds[run[0]] == "gpu")
                if cores > limit or gpus > 2 or rate < floor:
                    continue
                best = min(best, ((cores * 0.04 + gpus * 1.0) / rate, threads))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_number_of_threads_is_what_trying_all_finds(seed: int) -> None:
    draw = random.Random(seed)
    limit, ps_core_s = draw.choice([4, 6]), draw.choice([0.0, 0.004])
    works = {}
    once = [draw.uniform(0.2, 1.0) for _ in range(2)]
    sums = draw.uniform(0.0, 0.6)
    for threads in (1, 2, 4):
        layers = []
        for seconds in once:
            speed = threads ** draw.uniform(0.5, 1.1)
            layers.append(
                {
                    "cpu": cost(seconds / speed, sync_s=sums, transfer_s=0.1, parallel_sync=0.2),
                    "gpu": cost(seconds / 20, sync_s=sums, transfer_s=0.1, parallel_sync=0.2),
                }
            )
        given = {"threads": {"cpu": threads}} if threads > 1 else {}
        works[threads] = workload(*layers, ps_core_s=ps_core_s, **given)
    floor = draw.choice([0.0, 100.0, 250.0])
    expected, number = _cheapest(works, limit, floor, ps_core_s)
    plans = {
        threads: plan(work, _open(1, 2, 4, limit=limit), floor or None, method="exact")
        for threads, work in works.items()
    }
    feasible = {threads: one for threads, one in plans.items() if one.feasible}
    assert bool(feasible) == (number > 0)
    if feasible:
        threads, best = min(feasible.items(), key=lambda one: one[1].plan.rank)
        assert best.proven
        assert best.cost == pytest.approx(expected * best.workload.samples / 3600, rel=1e-9)
        assert {stage.threads or 1 for stage in best.stages if stage.type == "cpu"} <= {threads}
