"""The benchmark of the pace: questions drawn by seed, and what a trace of a run says."""

from pathlib import Path

import pytest

from bench.pace.examples import Cut, Form, Profiled
from bench.pace.questions import LEAST_S, UNITS, drawn, given, micro_batches_of
from bench.pace.sleeping import pace_of
from protos.job_pb2 import JobSpec


@pytest.mark.parametrize(
    ("method", "stages"),
    [
        ("random", 1),
        ("random", 2),
        pytest.param("random", 6, marks=pytest.mark.exhaustive),
        ("exact", 3),
        ("ppo", 2),
    ],
)
def test_a_drawn_question_is_answered_as_it_says(method, stages):
    question = drawn(5, stages, method, 1, 24)
    assert question == drawn(5, stages, method, 1, 24)
    found = question.decide()
    assert len(found.stages) == stages
    assert UNITS - 3 <= sum(stage.units for stage in found.stages) <= UNITS
    size = question.batch / micro_batches_of(question, found)
    for stage in found.stages:
        assert stage.compute_s * stage.units * size >= LEAST_S * (1 - 1e-9)


def test_a_given_plan_is_what_the_planner_answers():
    question = given([2, 3, 1], 0.06, 12, 1)
    found = question.decide()
    assert [stage.units for stage in found.stages] == [2, 3, 1]
    size = question.batch / 12
    assert found.throughput == pytest.approx(size / 0.06)


def trace(folder: Path, *workers: list[tuple[float, int]]) -> Path:
    for number, lines in enumerate(workers):
        text = "".join(f"{time} {rows}\n" for time, rows in lines)
        (folder / str(number)).write_text(text)
    return folder


def test_the_pace_is_that_of_whole_steps_over_all_workers(tmp_path):
    # Steps of 4 + 3 samples; the first one takes long, the others a second each.
    first = [(0.0, 4), (10.0, 4), (11.0, 4), (12.0, 4)]
    second = [(0.1, 3), (10.1, 3), (11.1, 3), (12.1, 3)]
    pace = pace_of(trace(tmp_path, first, second), 7, 4, 1)
    assert (pace.throughput, pace.steps, pace.seconds) == (7.0, 2, 2.0)


def test_samples_that_are_left_out_are_no_pace(tmp_path):
    with pytest.raises(ValueError, match="6 samples, expected 1 steps of 7"):
        pace_of(trace(tmp_path, [(0.0, 4)], [(0.1, 2)]), 7, 1, 0)


def test_a_stage_that_sleeps_takes_what_its_layers_do_with_all_that_is_computed_there():
    names, costs = ("one", "two", "three"), (0.2, 0.6, 0.4)  # s of 10 samples, half of it forward
    layers = [
        {"name": name, "cost": {"cpu": {"compute_s": cost, "forward_share": 0.5}}}
        for name, cost in zip(names, costs, strict=True)
    ]
    forms = {name: Form([1], 1.0, 1.0) for name in names}
    of = Profiled("job", 1, JobSpec(name="job"), {"reference_batch": 10, "layers": layers}, forms)
    cut = Cut("job-0", of, (1, 2), (1, 1), 1, 1)
    found = cut.sleeping([(0.1, 0.5), (0.3, 0.3)], 10)
    assert found.keys() == {0, 1}  # the other stage computes
    forward, backward = (sum(passes) * 10 for passes in zip(*found.values(), strict=True))
    assert forward + 0.1 == pytest.approx(0.4)
    assert backward == 0  # not less than nothing
    assert found[1][0] == pytest.approx(3 * found[0][0])
