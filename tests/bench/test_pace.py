"""The benchmark of the pace: questions drawn by seed, and what a trace of a run says."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.pace import cores
from bench.pace.cores import Waits, is_full
from bench.pace.examples import Cut, Form, Profiled
from bench.pace.questions import LEAST_S, UNITS, Executor, drawn, given, micro_batches_of
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


def test_trials_of_the_model_are_no_steps(tmp_path):
    lines = [(-3.0, 2), (-2.0, 2), (0.0, 4), (1.0, 3), (2.0, 4), (3.0, 3)]
    assert pace_of(trace(tmp_path, lines), 7, 2, 0, least=3).throughput == 3.5
    with pytest.raises(ValueError, match="18 samples, expected 2 steps of 7"):
        pace_of(tmp_path, 7, 2, 0)


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


def test_a_stage_that_sleeps_takes_of_a_small_micro_batch_what_it_was_priced_at():
    cost = {"compute_s": 0.4, "forward_share": 0.5, "fixed_s": 0.1}  # of 10 samples
    executor_s = 0.05  # a ninth of a step of 0.45 s, and in the last layer's `fixed_s`
    layers = [{"name": name, "cost": {"cpu": dict(cost)}} for name in ("one", "two")]
    layers[1]["cost"]["cpu"] |= {"compute_s": 0.0, "fixed_s": 0.1 + executor_s}
    work = {"reference_batch": 10, "layers": layers, "overhead": executor_s / 0.45}
    forms = {name: Form([1], 1.0, 1.0) for name in ("one", "two")}
    of = Profiled("job", 1, JobSpec(name="job"), work, forms)
    for computing, small in ((1, {0: 0.2 + 0.05}), (0, {1: 0.05})):
        cut = Cut("job-0", of, (0, 1), (1, 1), computing, 0)
        found = cut.sleeping([(0.0, 0.0)] * 2, 5)
        taken = {row: 5 * sum(passes) for row, passes in found.items()}
        assert taken == pytest.approx(small)


@pytest.mark.parametrize(
    ("busy", "waited", "measured", "full"),
    [
        ((0.05, 0.10, 0.04), (0.0, 0.05, 0.02), 0.10, True),
        ((0.05, 0.10, 0.04), (0.0, 0.05, 0.02), 0.15, False),  # more was lost than was waited
        ((0.05, 0.12, 0.04), (0.0, 0.05, 0.02), 0.10, False),  # that stage takes longer by itself
        ((0.05, 0.05, 0.04), (0.0, 0.005, 0.002), 0.065, False),  # next to nothing was waited
        (
            (0.09, 0.10, 0.04),
            (0.0, 0.05, 0.02),
            0.10,
            False,
        ),  # nor does another stage keep the pace
        ((0.05, 0.10, 0.04), (0.0, 0.05, 0.02), 0.05, False),  # nothing was lost
        ((0.05, 0.20, 0.04), (0.0, 0.10, 0.02), 0.10, True),  # of two workers, each half of it
    ],
)
def test_a_run_is_full_where_workers_waited_for_what_was_lost_and_are_as_fast_as_promised(
    busy, waited, measured, full
):
    units = (1, 2 if busy[1] == 0.20 else 1, 1)
    assert is_full(0.05, measured, busy, waited, units) is full


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux tells it alone")
def test_who_shares_a_core_waits_for_it_and_is_known_by_its_stage(tmp_path):
    spin = (
        "import os, sys, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "while time.process_time() < 1.0: pass"
    )
    folder = tmp_path / "job-1"
    names = [folder / f"stage-{s}-worker-{r}.launch" for s, r in ((0, 0), (1, 0), (1, 11))]
    others = [tmp_path / "job-12" / "stage-2-worker-0.launch"]
    begun = time.monotonic()
    with Waits("job-1") as waits:
        ran = [
            subprocess.Popen([sys.executable, "-c", spin, "--launch", str(name), "--bind", "x"])
            for name in names + others
        ]
        for process in ran:
            assert process.wait() == 0
        ended = time.monotonic()
    waited = waits.seconds(begun, ended)
    assert waited.keys() == {0, 1}
    # Four that each need a second of one core wait for the others, the last for three.
    assert waited[0] > 0.5
    assert waited[1] > 1.0
    assert waited[1] <= 2 * (ended - begun)


def test_what_a_step_takes_each_worker_is_priced_by_its_micro_batches():
    step_s, seconds = 0.004, 0.05
    for micro_batches in (2, 6):
        asked = given([2], seconds / 2, micro_batches, 1, Executor(step_s=step_s))
        found = asked.decide()
        assert [stage.units for stage in found.stages] == [2]
        step = seconds * micro_batches / 2 + step_s
        assert found.throughput == pytest.approx(asked.batch / step)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux tells it alone")
def test_what_a_program_and_its_descendants_use_is_nobody_elses():
    spin = "import time\nwhile time.process_time() < 0.6: pass\n"
    child = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {spin!r}])"
    own = time.process_time()
    assert cores.own_s(os.getpid()) >= own - 0.1  # and what children used that earlier tests had
    waiting = f"{child}; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", waiting]) as process:
        try:
            while cores.own_s(process.pid) < 0.3:  # the grandchild is seen while it runs
                assert process.poll() is None
                time.sleep(0.01)
            assert cores.own_s(process.pid) < 5  # and nothing of its parent's
        finally:
            process.kill()
