"""A job's own page: how it goes, and how it came to where it stands."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from heterps.client.records import Job, State
from heterps.console.pages import charts
from heterps.console.pages.attempts import attempt_marks, attempt_sections
from heterps.console.pages.history import History
from heterps.console.pages.parts import clock, spent
from heterps.console.traffic import Sample, Shard, rates
from heterps.html.markup import Markup, join, tag
from heterps.html.palette import Palette
from heterps.html.parts import bars, section, table, tiles
from heterps.page.measured import measured
from heterps.view.decision import types_of
from heterps.view.failure import kept_model
from heterps.view.figures import count, duration, money, percent, rate, size
from heterps.view.metrics import metrics_by_split
from heterps.view.plan import layers_text, units_of
from heterps.view.table import Column

if TYPE_CHECKING:
    from scheduler import Decision

_STAGES = ("stage", "*computing: lately above, so far below", ">lately", ">so far", ">predicted")
_SHARDS = ("shard", ">rows", ">memory", ">keys with a row", ">pulled", ">pushed", ">in", ">out")


def job_sections(
    job: Job, decision: "Decision | None", history: History, traffic: Sequence[Sample]
) -> Iterator[Markup]:
    """The parts of the page, as far as there is something to say."""
    if job.state is State.FAILED and job.reason:
        yield section("failure", "Why it failed", None, _reason(job.reason))
    yield section("figures", "Figures", None, _figures(job, decision))
    if sum(len(run.points) for run in history.runs) > 1:
        yield section("curves", "Progress", None, _curves(job, history, decision))
    yield from attempt_sections(job, decision, history)
    if decision is not None and history.stages and decision.stages:
        caption = (
            "The share of its time that the first worker of each stage computes; the rest it "
            "waits for rows, for other stages, or for the slowest."
        )
        shown = _stages(decision, history)
        yield section("stages", "Stage utilisation", caption, shown)
    if traffic:
        yield section("shards", "Parameter servers", None, _shards(traffic, job))
    if job.metrics:
        yield section("metrics", "Metrics", None, _metrics(job))
    if decision is not None:
        run = history.measured_so_far(decision, job)
        if run.measured is not None:
            whole = "the whole run" if job.state.is_final else "the run up to now; it goes on"
            yield section(
                "measured",
                "Predicted and measured",
                f"Measured over {whole}.",
                measured(run, Palette(types_of(run))),
            )
    yield section("states", "How it came here", None, _states(job, history))


def _reason(reason: str) -> Markup:
    head, _, rest = reason.partition("\n")
    return join(
        tag("p", head, class_="warn"),
        tag("pre", rest, tabindex="0", role="region", aria_label="details") if rest else None,
    )


def _figures(job: Job, decision: "Decision | None") -> Markup:
    feasible = decision is not None and decision.feasible
    shown = []
    if job.total_steps:
        shown.append(("steps", f"{job.step:,}", f"of {job.total_steps:,}"))
    if job.step:
        floor = f"predicted {rate(decision.throughput)}" if decision and feasible else ""
        shown.append(("samples/s", rate(job.samples_per_s), floor))
        shown.append(("loss", charts.loss_text(job.loss), f"after {count(job.samples)} samples"))
    shown += [(k.replace("_", " "), f"{v:.4f}", "") for k, v in job.metrics.items() if "auc" in k]
    if decision and feasible:
        ran = decision.measured
        paid = spent(job, decision.plan.price_per_hour)
        if ran is not None and not job.attempts:
            paid = ran.cost
        an_hour = f"{money(decision.plan.price_per_hour)} an hour"
        shown.append(("cost so far", money(paid), f"predicted {money(decision.cost)}; {an_hour}"))
    if job.eta_s is not None and job.state is State.RUNNING:
        shown.append(("left to train", duration(job.eta_s), "at the pace so far"))
    elif job.ended_at:
        shown.append(("took", duration(job.ended_at - job.submitted_at), "from submit to end"))
    else:
        shown.append(("state", str(job.state), job.reason.splitlines()[0] if job.reason else ""))
    return tiles(shown)


def _curves(job: Job, history: History, decision: "Decision | None") -> Markup:
    losses, paces = history.losses, history.rates
    marks = attempt_marks(job, history)
    level = None
    if decision is not None and decision.feasible and paces:
        most = max(value for _, value in paces)
        if most / 20 < decision.throughput < most * 20:  # else the curve would be a flat line
            level = (decision.throughput, "predicted")
    made = []
    if len(losses) > 1:
        made.append(
            charts.over_time(
                "loss", [("loss", "", losses)], charts.loss_text, zero=False, marks=marks
            )
        )
    if len(paces) > 1:
        made.append(
            charts.over_time(
                "samples/s", [("samples/s", "", paces)], charts.rate_text, level, marks=marks
            )
        )
    return tag("div", *made, class_="pair")


def _stages(decision: "Decision", history: History) -> Markup:
    palette = Palette(types_of(decision))
    rows = []
    slowest = max((stage.busy_s for stage in decision.stages), default=0.0)
    for number, stage in enumerate(decision.stages[: len(history.stages)]):
        shares = history.utilisation(number)
        expected = stage.compute_s / slowest if slowest else 0.0
        name = join(
            f"{number}: ",
            palette.chip(stage.type, f"{units_of(stage)} × {stage.type}"),
            tag("small", layers_text(decision, stage.first, stage.last), class_="id"),
        )
        if shares is None:
            rows.append((name, "", "", "", percent(expected)))
            continue
        colour = palette.of(stage.type)
        drawn = bars(((shares[0], "bar", colour), (shares[1], "bar thin", colour)))
        rows.append((name, drawn, f"{shares[0]:.0%}", f"{shares[1]:.0%}", percent(expected)))
    return table("Utilisation by stage", _STAGES, rows)


def _shards(traffic: Sequence[Sample], job: Job) -> Markup:
    last, before = traffic[-1], traffic[-2] if len(traffic) > 1 else None
    rows = []
    for place, shard in enumerate(last.shards):
        if shard.problem:
            why = tag("span", shard.problem, class_="why")
            rows.append((f"{shard.label}", why, *[""] * 6))
            continue
        old = before.shards[place] if before and place < len(before.shards) else None
        passed = last.at - before.at if before else 0.0
        hit = percent(1 - shard.missed / shard.pulled) if shard.pulled else ""
        rows.append(
            (
                join(shard.label, tag("small", shard.address, class_="id")),
                f"{shard.rows:,}",
                size(shard.memory_bytes),
                hit,
                *(
                    _speed(shard, old, name, passed, unit)
                    for name, unit in (
                        ("pulled", "keys/s"),
                        ("pushed", "keys/s"),
                        ("bytes_in", "/s"),
                        ("bytes_out", "/s"),
                    )
                ),
            )
        )
    begun = job.started_at or traffic[0].at
    lines = [
        (name, kind, [(max(0.0, at - begun), value) for at, value in rates(traffic, name)])
        for name, kind in (("pulled", ""), ("pushed", "second"))
    ]
    if len(lines[0][2]) < 2:
        return table("Shards", _SHARDS, rows)
    when = "" if job.state is State.RUNNING else f"As last seen, {clock(last.at)}."
    chart = charts.over_time("keys/s of all shards", lines, charts.rate_text)
    return join(
        tag("p", when, class_="caption") if when else None, table("Shards", _SHARDS, rows), chart
    )


def _speed(shard: Shard, old: Shard | None, name: str, passed: float, unit: str) -> str:
    if old is None or old.problem or passed <= 0:
        return ""
    grown = max(0.0, (getattr(shard, name) - getattr(old, name)) / passed)
    return f"{size(grown)}{unit}" if unit == "/s" else f"{count(grown)} {unit}"


def _metrics(job: Job) -> Markup:
    names, rows = metrics_by_split(job.metrics)
    columns: tuple[str | Column, ...] = ("split", *(Column(name, number=True) for name in names))
    return table("Metrics by split", columns, rows)


def _states(job: Job, history: History) -> Markup:
    entered = list(history.states) or [(State.QUEUED, job.submitted_at)]
    columns = ("state", "entered", ">for")
    ends = [at for _, at in entered[1:]] + [job.ended_at]
    rows = [
        (str(state), clock(at), duration(end - at) if end and not state.is_final else "")
        for (state, at), end in zip(entered, ends, strict=True)
    ]
    parts = [table("States", columns, rows)]
    which = kept_model(job.state is State.SUCCEEDED, job.end_reason)
    if job.output and which:
        parts.append(tag("p", f"The {which} lies in {job.output}", class_="aside"))
    return join(*parts)
