"""Reports: complete at 80 columns, plain in a pipe, honest about what was not measured."""

import io
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

import scheduler
from heterps import figures, reasons, report
from heterps.records import Job, Node, Process, State
from scheduler.decision import Measured

PLAN = Path(__file__).resolve().parents[2] / "examples/plan"
JOB = Job(
    job_id="flights-1a2b3c",
    name="flights",
    state=State.SUCCEEDED,
    reason="",
    submitted_at=1000.0,
    started_at=1010.0,
    ended_at=1100.0,
    phase="done",
    step=100,
    total_steps=100,
    samples=204_800,
    loss=0.4321,
    samples_per_s=81_000.0,
    metrics={"test_auc": 0.8212, "test_logloss": 0.41, "valid_auc": 0.82},
    output="/somewhere/runs/flights-1a2b3c",
)


@cache
def decision():
    resources = scheduler.load_resources(PLAN / "resources.yaml")
    workload = scheduler.load_workload(PLAN / "workload.yaml")
    return scheduler.plan(workload, resources, min_throughput=100_000, method="greedy")


def guessed():
    """The same with figures that nobody measured."""
    base = decision()
    layers = tuple(
        replace(layer, cost={k: replace(c, estimated=True) for k, c in layer.cost.items()})
        for layer in base.workload.layers
    )
    types = tuple(replace(kind, emulated=kind.name == "v100") for kind in base.resources.types)
    return replace(
        base,
        workload=replace(base.workload, layers=layers),
        resources=replace(base.resources, types=types),
        measured=Measured(50_000.0, 4.0, 3.0, 20.0, True, (1e-6,) * len(base.stages)),
        probabilities={
            layer.name: {"cpu": 0.75, "t4": 0.25, "v100": 0.0} for layer in base.workload.layers
        },
    )


def rendered(what: RenderableType, width: int = 80, terminal: bool = False) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=terminal, highlight=False, markup=False
    )
    report.show(console, what)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_report_fits_its_width_and_is_plain_in_a_pipe(width):
    text = rendered(report.decision_report(guessed()), width)
    text += rendered(report.outcome_report(JOB, guessed()), width)
    assert "\x1b" not in text
    assert "…" not in text, "nothing is cut off"
    for line in text.splitlines():
        assert len(line) <= width
        assert line == line.rstrip()


def test_a_terminal_gets_colour():
    assert "\x1b[" in rendered(report.decision_report(decision()), terminal=True)


def test_a_report_has_everything():
    text = rendered(report.decision_report(guessed()), 200)
    base = guessed()
    for layer in base.workload.layers:
        assert layer.name in text
    for word in ("CT", "DT", "memory", "units", "slowest", "parameter server", "(floor 100,000)"):
        assert word in text
    for other in base.alternatives:
        assert other.method in text
    assert figures.money(base.cost) in text
    assert " 75% ██████" in text
    for reason in base.reasons:
        assert reason.split(" ")[0] in text


def test_figures_that_were_not_measured_say_so():
    plan = rendered(report.decision_report(guessed()), 200)
    assert "v100 (emulated, estimated)" in plan
    assert "estimated: from data sheets" in plan
    assert "emulated: v100" in plan
    outcome = rendered(report.outcome_report(JOB, guessed()))
    assert "predicted (estimated)" in outcome
    assert "measured (emulated)" in outcome
    honest = rendered(report.decision_report(decision()))
    assert "emulated" not in honest
    assert "(estimated)" not in honest


def test_the_outcome_has_metrics_and_the_model():
    text = rendered(report.outcome_report(JOB, guessed()))
    assert "0.8212" in text
    assert "succeeded in 1 min 40 s" in text
    assert "/somewhere/runs/flights-1a2b3c" in text
    assert "0.09" in text, "measured throughput over predicted"


def test_an_infeasible_plan_says_why():
    resources = scheduler.load_resources(PLAN / "resources.yaml")
    workload = scheduler.load_workload(PLAN / "workload.yaml")
    bad = scheduler.plan(workload, resources, min_throughput=1e12, method="greedy")
    text = rendered(report.decision_report(bad))
    assert "infeasible" in text
    assert " ".join(bad.reason.split()[:4]) in " ".join(text.split())
    assert "chosen" not in text


def test_a_failure_shows_its_reason_whole():
    reason = "stage 1 worker 0 ended by signal 9 (SIGKILL)\n  its log ends: " + "x" * 300
    failed = replace(JOB, state=State.FAILED, reason=reason, metrics={}, output="")
    text = rendered(report.outcome_report(failed, None))
    assert "SIGKILL" in text
    assert text.count("x") == 300
    assert all(len(line) <= 80 for line in text.splitlines())


def test_tables_of_jobs_and_nodes_fit():
    node = Node(
        node_id="v100-abcdef",
        kind="node",
        address="127.0.0.1:45123",
        type="v100",
        units=4,
        units_used=1,
        emulated=True,
        device="v100, emulated on AMD EPYC 7763 64-Core Processor on some-host",
        processes=(Process("p1", JOB.job_id, "stage", "stage 1 worker 0", 4242, True, 0),),
    )
    text = rendered(report.nodes_table([node])) + rendered(report.jobs_table([JOB] * 3))
    assert "v100 (emulated)" in text
    assert "4242" in text
    assert "0.8212" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_numbers_read_well():
    assert [figures.money(v) for v in (0.0, 1234.5, 0.5, 0.00012)] == [
        "$0.00",
        "$1,234.50",
        "$0.50",
        "$0.00012",
    ]
    assert figures.money(float("inf")) == "-"
    assert [figures.size(v) for v in (0, 999, 2.4e9, 8e12)] == ["0 B", "999 B", "2.4 GB", "8.0 TB"]
    assert figures.duration(3720) == "1 h 2 min"
    assert figures.per_sample(2.5e-3) == "2.50 ms"


def test_a_traceback_keeps_the_users_frames_alone():
    reason = """profiling failed: ValueError: bad width
Traceback (most recent call last):
  File "/x/workers/profiler.py", line 3, in run
    model = build()
  File "/home/me/model.py", line 9, in build
    raise ValueError("bad width")
ValueError: bad width"""
    text = reasons.shortened(reason)
    assert "/home/me/model.py" in text
    assert "workers" not in text
    assert text.count("bad width") == 2, "the source line and the error"
    ours = reason.replace("/home/me/model.py", "/x/workers/data/reader.py")
    assert reasons.shortened(ours) == "profiling failed: ValueError: bad width"
    assert reasons.shortened("") == ""
