"""Reports: complete at 80 columns, plain in a pipe, honest about what was not measured."""

import io
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

import scheduler
from heterps import report
from heterps.client.records import Job, Node, PlanUse, Process, State
from heterps.console.pages.what_if import compared
from heterps.report.plans import plans_report
from heterps.report.progress import line as progress_line
from heterps.view import failure as reasons
from heterps.view import figures
from heterps.view.figures import rate
from scheduler.decision.record import Measured, ParetoPoint, Relaxation

PLAN = Path(__file__).resolve().parents[3] / "examples/plan"
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
    for word in ("CT", "DT", "memory", "units", "slack", "parameter server", "(floor 100,000)"):
        assert word in text
    for other in base.alternatives:
        assert other.method in text
    assert figures.money(base.cost) in text
    assert " 75% ██████" in text
    for reason in base.reasons:
        assert reason.split(" ")[0] in text


def test_the_slack_of_each_stage_stands_in_its_row():
    base = decision()
    rows = rendered(report.plan_table(base), 200).splitlines()[2:]
    for stage, slack, row in zip(base.stages, base.slack, rows, strict=False):
        assert row.endswith("slowest" if stage.bottleneck else figures.percent(slack))


def test_the_critics_values_have_a_column():
    base = guessed()
    values = {layer.name: -0.125 for layer in base.workload.layers}
    text = rendered(report.probabilities_table(replace(base, values=values)))
    assert text.count("-0.125") == len(base.workload.layers)
    assert "value" not in rendered(report.probabilities_table(base))


def test_the_agents_shares_of_many_types_are_named():
    base = guessed()
    shares = {"cpu": 0.75, "v100": 0.25, **{f"type-{n}": 0.0 for n in range(14)}}
    many = replace(base, probabilities={layer.name: shares for layer in base.workload.layers})
    text = rendered(report.probabilities_table(many))
    assert "cpu 75%, v100 25%" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_alternatives_say_how_far_from_the_bound_and_how_many_plans_they_tried():
    base = decision()
    others = tuple(
        replace(
            other,
            evaluations=12_345_678,
            plan=replace(other.plan, cost=1.5 * base.lower_bound, feasible=True),
        )
        for other in base.alternatives
    )
    text = rendered(report.alternatives_table(replace(base, alternatives=others)), 160)
    assert text.count("12.3 M") == text.count(" 50% ") == len(others)
    free = replace(base, plan=replace(base.plan, cost=0.0), lower_bound=0.0, gap=0.0)
    alone = rendered(report.alternatives_table(replace(free, alternatives=())), 160)
    assert alone.split()[-2:] == ["$0.00", "0%"]
    silent = tuple(replace(other, evaluations=0) for other in base.alternatives)
    assert "tried" not in rendered(report.alternatives_table(replace(base, alternatives=silent)))


def test_the_curve_marks_the_chosen_plan_and_what_is_not_proven():
    base = decision()
    here = ParetoPoint(base.throughput, base.plan.price_per_hour, base.cost, base.assignment, True)
    fast = replace(here, throughput=2 * base.throughput, cost=2 * base.cost, proven=False)
    curve = rendered(report.pareto_table(replace(base, pareto=(fast, here)))).splitlines()
    chosen, other = curve[2:]
    assert chosen.startswith("→")
    assert "not proven" not in chosen
    assert other.endswith("not proven")
    assert figures.rate(fast.throughput) in other


def test_what_would_make_a_plan_possible_is_said_in_words():
    changes = (
        Relaxation("limit.v100", 8, 11, 1e6, 20.0, 5.5),
        Relaxation("min_throughput", 2e6, 1.5e6, 1.5e6, 20.0, 6.5),
        Relaxation("allow.t4", 0, 1, 1e6, 20.0, 7.5),
    )
    text = rendered(report.decision_report(replace(decision(), relaxations=changes)))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "limit of v100 8 11 1,000,000 $20.00 $5.50" in rows
    assert "floor on throughput 2,000,000 1,500,000 1,500,000 $20.00 $6.50" in rows
    assert "allow t4 no yes 1,000,000 $20.00 $7.50" in rows


def test_a_what_if_shows_before_beside_after():
    base = decision()
    dear = tuple(
        replace(kind, price_per_hour=2 * kind.price_per_hour) for kind in base.resources.types
    )
    after = replace(
        base,
        resources=replace(base.resources, types=dear),
        plan=replace(base.plan, cost=2 * base.cost),
        gap=0.1,
    )
    text = rendered(report.what_if_report(base, after))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "v100.price_per_hour $2.42 $4.84 +100.0%" in rows
    assert f"cost {figures.money(base.cost)} {figures.money(2 * base.cost)} +100.0%" in rows
    assert "the same" in rows, "the plan"
    assert all(len(line) <= 80 for line in text.splitlines())


def test_ten_times_as_much_is_a_factor_in_a_terminal_and_a_percentage_on_a_page():
    base = decision()
    after = replace(base, plan=replace(base.plan, cost=10.8 * base.cost))
    assert " 10.8x" in rendered(report.what_if_report(base, after))
    page = compared(base, after)
    assert "+980.0%" in page
    assert "10.8x" not in page


def test_a_long_list_of_differences_is_cut_and_counted():
    base = decision()
    layers = tuple(
        replace(layer, cost={k: replace(c, compute_s=1.0) for k, c in layer.cost.items()})
        for layer in base.workload.layers
    )
    other = replace(base, workload=replace(base.workload, layers=layers))
    changed = sum(len(layer.cost) for layer in layers)
    text = rendered(report.diff_report("a", base, "b", other))
    assert f"and {changed - 24} more" in text


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


def test_steps_and_the_overhead_are_said_in_a_sentence_each():
    base = decision()
    assert "micro-batch" not in rendered(report.decision_report(base))
    plan = replace(base.plan, micro_batches=8, staleness=1)
    workload = replace(base.workload, batch=4096)
    told = replace(base, plan=plan, workload=workload, overhead=0.05)
    text = " ".join(rendered(report.decision_report(told)).split())
    assert "A step of 4,096 samples is computed in 8 micro-batches." in text
    assert "Each step lacks 1 update (staleness 1)" in text
    assert "takes 5.0% of the time besides, so the plan is made for 5.3% more" in text
    fresh = replace(told, plan=replace(plan, staleness=0), min_throughput=0.0)
    text = " ".join(rendered(report.decision_report(fresh)).split())
    assert "Each step has all updates (staleness 0)" in text
    assert "so the plan is made" not in text
    left = rate(fresh.throughput * 0.95)
    assert f"takes 5.0% of the time besides: {left} samples/s are to be expected" in text


@pytest.mark.parametrize(
    ("steps", "reached", "said"),
    [
        (
            120,
            101_000.0,
            "The floor of 100,000 samples/s was met: 101,000 samples/s over 120 steady steps",
        ),
        (
            120,
            97_000.0,
            "was missed by 3.0%: 97,000 samples/s over 120 steady steps",
        ),
        (99, 150_000.0, "samples/s was met is not known: there were 99 steady steps; 100 tell"),
    ],
)
def test_whether_the_floor_was_met_is_said_after_the_run(steps, reached, said):
    base = decision()
    busy = tuple(0.9 * stage.compute_s for stage in base.stages)
    ran = replace(base, measured=Measured(9e4, 4.0, 3.0, 20.0, False, busy, reached, steps))
    text = " ".join(rendered(report.outcome_report(JOB, ran)).split())
    assert said in text
    assert "Measured against predicted computing: stage 0 -10%" in text


def test_the_outcome_has_metrics_and_the_model():
    text = rendered(report.outcome_report(JOB, guessed()))
    assert "0.8212" in text
    assert "succeeded in 1 min 40 s" in text
    assert "/somewhere/runs/flights-1a2b3c" in text
    assert "0.09" in text, "measured throughput over predicted"


@pytest.mark.parametrize(
    ("state", "step", "said"),
    [
        (State.SUCCEEDED, 100, "step 100 of 100 (100%)"),
        (State.SUCCEEDED, 40, "step 40 of 100 (validation ended it)"),
        (State.FAILED, 40, "step 40 of 100 (40%)"),
    ],
)
def test_how_far_a_job_has_trained(state, step, said):
    assert said in rendered(report.job_report(replace(JOB, state=state, step=step)))


def test_a_job_that_diverged_says_which_model_it_left_and_what_to_change():
    job = replace(JOB, state=State.FAILED, end_reason="diverged", reason="step 7: loss nan")
    text = " ".join(rendered(report.outcome_report(job, None), 200).split())
    assert "diverged: a loss or gradient was not finite" in text
    assert "model of before the step that diverged saved in /somewhere/runs" in text
    (_, logs), (command, what) = report.job_commands(job)
    assert "wrote" in logs
    assert command == "heterps submit JOB.yaml"
    assert "train.clip" in what
    failed = replace(JOB, state=State.FAILED, end_reason="user_error")
    assert "/somewhere" not in rendered(report.outcome_report(failed, None))


def test_an_infeasible_plan_says_why():
    resources = scheduler.load_resources(PLAN / "resources.yaml")
    workload = scheduler.load_workload(PLAN / "workload.yaml")
    bad = scheduler.plan(workload, resources, min_throughput=1e12, method="greedy")
    text = rendered(report.decision_report(bad))
    assert "no plan" in text
    assert " ".join(bad.plan.reason.split()[:4]) in " ".join(text.split())
    assert "→" not in text


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


def test_the_plans_of_a_job_stand_beside_each_other():
    plans = [
        PlanUse("2 cpu + 1 t4", 1, 0, 1e9, "planned", 1.25, 4000.0, 1500.0),
        PlanUse("3 t4", 1, 400, 1e9 + 60, "replanned", 2.5, 6000.0, 0.0),
    ]
    text = rendered(plans_report(plans))
    for part in ("2 cpu + 1 t4", "planned", "$1.25", "1,500", "replanned", "400", "6,000"):
        assert part in text, text


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
    assert figures.duration(0.0004) == "0.4 ms"
    assert figures.per_sample(2.5e-3) == "2.50 ms"
    assert figures.per_sample_in(2.5e-4)(1.25e-5) == "0.01 ms"
    shares = (0.0, 0.00042, 0.042, 0.42, 4.2, float("inf"))
    assert [figures.percent(v) for v in shares] == ["0%", "0.04%", "4.2%", "42%", "420%", "-"]
    counts = (0, 9_999, 12_000, 999_999, 5e6, 2.5e9)
    assert [figures.count(v) for v in counts] == ["0", "9,999", "12 k", "1,000 k", "5 M", "2.5 G"]


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


def test_terms_of_a_loss_are_shown_beside_it():
    job = replace(JOB, loss_terms={"click": 0.3, "late": float("nan")})
    assert "loss 0.4321 (click 0.3000, late nan)" in progress_line(job)
    assert job.to_json()["loss_terms"] == {"click": 0.3, "late": None}
