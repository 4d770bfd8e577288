"""A job's attempts and the cuts that they can go on from, on its own page."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from heterps.client.attempts import Trained, trained
from heterps.client.records import Cut, Job, Move, PlanUse, Recovery, Share
from heterps.console.pages.history import History
from heterps.console.pages.parts import ago
from heterps.html.markup import Markup, tag
from heterps.html.parts import section, table
from heterps.view.figures import duration, money, rate, size
from heterps.view.plan import use_cells

if TYPE_CHECKING:
    from scheduler import Decision

_ATTEMPTS = (
    *("attempt", ">from step", ">to step", "ended", ">trained for"),
    *(">steps lost", ">time lost", ">cost of that", ">until training again"),
)
_RECOVERIES = ("when", "lost", ">took", ">from step", ">steps lost", ">cost of that", "why")
_SHARES = ("worker", "on", "since", "until", ">samples/s predicted")
_MOVES = (
    *("when", "from", "to", "why", ">step", ">took", ">samples/s before", ">predicted"),
    *(">$/h before", ">$/h after", "failed"),
)
_PLANS = ("since", "plan", "why", ">from step", ">$/h", ">predicted", ">samples/s")
_CUTS = ("step", "taken", ">took", ">training waited", ">written", "metrics", "where")


def attempt_sections(job: Job, decision: "Decision | None", history: History) -> Iterator[Markup]:
    """The parts of the page about starting over, where there was or can be any."""
    if job.attempts or job.from_step:
        price = decision.plan.price_per_hour if decision and decision.feasible else 0.0
        rows = [_attempt(one) for one in trained(job, price)]
        caption = (
            "An attempt begins with the last checkpoint of those before it; what they had trained "
            "after that is lost, and trained again. Costs are at each plan's price."
        )
        yield section("attempts", "Attempts", caption, table("Attempts", _ATTEMPTS, rows))
    if job.recoveries:
        rows = [_recovery(one) for one in reversed(job.recoveries)]
        caption = (
            "Workers that died were replaced, and the others kept their processes. Where nobody "
            "had the state of a stage any more, all went back to a checkpoint."
        )
        shown = table("Workers replaced", _RECOVERIES, rows)
        yield section("recoveries", "Workers replaced", caption, shown)
    if job.shares:
        rows = [_share(one) for one in reversed(job.shares)]
        caption = (
            "No unit was free for these workers, so each was beside another one of the job until "
            "there was. The job paid one unit less for each, and was slower."
        )
        shown = table("Units shared", _SHARES, rows)
        yield section("shares", "Units shared", caption, shown)
    if job.moves:
        rows = [_move(one) for one in reversed(job.moves)]
        caption = "It took a checkpoint, and workers of another plan went on from it."
        yield section("moves", "Moves", caption, table("Moves", _MOVES, rows))
    if len(history.plans) > 1:
        rows = [_plan(one) for one in reversed(history.plans)]
        caption = "Each plan that it has trained under, with the samples/s that it was to come to."
        yield section("plans", "Plans", caption, table("Plans", _PLANS, rows))
    if job.cut_error:
        text = tag("p", f"The newest checkpoint failed: {job.cut_error}", class_="warn")
        yield section("cut-failed", "A checkpoint failed", None, text)
    if job.cuts:
        rows = [_cut(cut) for cut in reversed(job.cuts)]
        caption = f"Go on from one with heterps submit --resume {job.job_id}@STEP"
        yield section("cuts", "Checkpoints", caption, table("Checkpoints", _CUTS, rows))


def attempt_marks(job: Job, history: History) -> Sequence[tuple[float, str]]:
    """Where on a curve over the time in training each attempt began, or workers were replaced."""
    steps = {one.number: one.from_step for one in job.attempts} | {job.attempt: job.from_step}
    marks: list[tuple[float, str]] = []
    runs = history.runs
    for before, run in pairwise(runs):
        text = f"attempt {run.attempt} from step {steps.get(run.attempt, 0)}"
        if run.attempt == before.attempt:
            at = run.points[0].at
            begun = [(0.0, f"from step {before.points[-1].step}")]
            begun += [(r.at, f"workers replaced, from step {r.step}") for r in job.recoveries]
            begun += [(m.at, f"{m.after}, from step {m.step}") for m in job.moves if not m.failed]
            text = max(one for one in begun if one[0] < at)[1]
        marks.append((run.began_s, text))
    return marks


def _attempt(one: Trained) -> tuple[Markup | str, ...]:
    lost = one.lost_s > 0
    return (
        str(one.number),
        f"{one.from_step:,}",
        f"{one.step:,}",
        one.end_reason,
        duration(one.seconds) if one.seconds else "",
        f"{one.lost_steps:,}" if lost else "",
        duration(one.lost_s) if lost else "",
        money(one.lost_cost) if lost else "",
        duration(one.away_s) if one.away_s else "",
    )


def _recovery(one: Recovery) -> tuple[Markup | str, ...]:
    return (
        ago(one.at),
        ", ".join(one.lost) or "none",
        duration(one.seconds),
        f"{one.step:,}",
        f"{one.lost_steps:,}" if one.back else "",
        money(one.lost_cost) if one.back else "",
        one.reason,
    )


def _share(one: Share) -> tuple[Markup | str, ...]:
    until = ago(one.until) if one.until else "now"
    return one.process, one.node, ago(one.at), until, rate(one.throughput)


def _move(one: Move) -> tuple[Markup | str, ...]:
    return (
        ago(one.at),
        one.before,
        one.after,
        one.reason,
        f"{one.step:,}",
        duration(one.seconds) if not one.failed else "",
        rate(one.measured) if one.measured else "",
        rate(one.predicted),
        money(one.price_before),
        money(one.price_after),
        one.failed,
    )


def _plan(one: PlanUse) -> tuple[Markup | str, ...]:
    return ago(one.began_at), *use_cells(one)


def _cut(cut: Cut) -> tuple[Markup | str, ...]:
    return (
        f"{cut.step:,}",
        ago(cut.taken_at),
        duration(cut.seconds),
        duration(cut.stall_s),
        size(cut.bytes),
        ", ".join(f"{name} {value:.4f}" for name, value in cut.metrics.items()),
        tag("small", cut.place, class_="id"),
    )
