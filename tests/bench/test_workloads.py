"""The unseen problems: sound, varied, solvable, and the same every time."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from bench.scheduler.families import FAMILIES
from bench.scheduler.workloads import DEMANDS, load_derived, problem, problems
from scheduler.methods.exact import solve
from scheduler.problem.cost import CostModel
from scheduler.problem.provision import provision
from scheduler.problem.workload import Resources, Workload

SMALL = {"layers": (5, 7), "types": (2, 3)}
COUNT = len(FAMILIES) * len(DEMANDS)


@pytest.fixture(scope="module")
def drawn():
    return list(problems(COUNT, seed=3, **SMALL))


def test_every_family_meets_every_demand(drawn):
    pairs = Counter((given.family, given.demand) for given in drawn)
    assert len(pairs) == COUNT
    assert {given.layers for given in drawn} <= {5, 6, 7}
    assert {given.types for given in drawn} <= {2, 3}


def test_what_was_derived_restores_the_same_problems(drawn):
    derived = json.loads(json.dumps({given.name: given.derived for given in drawn}))
    again = list(problems(COUNT, seed=3, derived=derived, **SMALL))
    assert again == drawn


def test_a_problem_does_not_depend_on_how_many_are_drawn(drawn):
    assert problem(7, seed=3, **SMALL) == drawn[7]
    assert problem(7, seed=4, **SMALL) != drawn[7]


def test_every_problem_has_a_plan(drawn):
    for given in drawn:
        found = solve(given.model(), given.min_throughput)
        assert found.plan is not None, given.name
        assert found.plan.feasible, given.name


def test_floors_are_where_they_should_be(drawn):
    for given in drawn:
        top = solve(given.model()).max_throughput
        share = given.min_throughput / top
        low, high = {
            "none": (0.0, 0.0),
            "moderate": (0.1, 0.8),
            "near": (0.9, 0.995),
            "shared": (1e-9, 1.0),
        }[given.demand]
        assert low * (1 - 1e-9) <= share <= high * (1 + 1e-9), given.name


def test_shared_limits_bind(drawn):
    for given in (given for given in drawn if given.demand == "shared"):
        wide = [{**kind, "limit": 100_000} for kind in given.resources["types"]]
        loose = CostModel(Workload.parse(given.workload), Resources.parse({"types": wide}))
        free = solve(loose, given.min_throughput).plan
        held = solve(given.model(), given.min_throughput).plan
        assert free.cost < held.cost * (1 - 1e-9), given.name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layers", "types"), [(5, 2), (64, 8), (20, 16)])
def test_families_write_sound_files(family, layers, types):
    workload, resources = FAMILIES[family](np.random.default_rng(0), layers, types)
    model = CostModel(
        Workload.parse(json.loads(json.dumps(workload))),
        Resources.parse(json.loads(json.dumps(resources))),
    )
    assert (model.num_layers, model.num_types) == (layers, types)
    assert model.usable.any(axis=1).all()


def test_costs_have_no_common_scale():
    costs = [
        FAMILIES["click"](np.random.default_rng(seed), 5, 2)[0]["layers"][-1]["cost"]["cpu"]
        for seed in range(40)
    ]
    seconds = [cost["compute_s"] for cost in costs]
    assert max(seconds) > 1000 * min(seconds)


def test_a_flushed_plan_of_many_stages_gets_units_that_keep_a_floor_near_the_highest() -> None:
    """Seventeen stages of up to 16 units: a search of so many choices does not come to an end."""
    drawn = problem(15, derived=load_derived())
    steps = {"staleness": 0, "micro_batches": 16, "batch": drawn.workload["reference_batch"]}
    model = replace(drawn, workload=drawn.workload | steps).model()
    assignment = [4, 4, 5, 4, 5, 5, 4, 5, 5, 0, 5, 3, 5, 0, 4, 5, 0, 4, 0, 3]
    found = provision(model, assignment, 12_500.0)
    assert found.feasible
    assert found.throughput >= 12_500.0
