"""A job's attempts and the cuts that they can go on from, on its own page."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from heterps.client.attempts import Trained, trained
from heterps.client.records import Cut, Job
from heterps.console.pages.history import History
from heterps.console.pages.parts import ago
from heterps.html.markup import Markup, tag
from heterps.html.parts import section, table
from heterps.view.figures import duration, money, size

if TYPE_CHECKING:
    from scheduler import Decision

_ATTEMPTS = (
    *("attempt", ">from step", ">to step", "ended", ">trained for"),
    *(">steps lost", ">time lost", ">cost of that", ">until training again"),
)
_CUTS = ("step", "taken", ">took", ">training waited", ">written", "metrics", "where")


def attempt_sections(job: Job, decision: "Decision | None") -> Iterator[Markup]:
    """The parts of the page about starting over, where there was or can be any."""
    if job.attempts or job.from_step:
        price = decision.plan.price_per_hour if decision and decision.feasible else 0.0
        rows = [_attempt(one) for one in trained(job, price)]
        caption = (
            "An attempt begins with the last checkpoint of those before it; what they had trained "
            "after that is lost, and trained again. Costs are at each plan's price."
        )
        yield section("attempts", "Attempts", caption, table("Attempts", _ATTEMPTS, rows))
    if job.cut_error:
        text = tag("p", f"The newest checkpoint failed: {job.cut_error}", class_="warn")
        yield section("cut-failed", "A checkpoint failed", None, text)
    if job.cuts:
        rows = [_cut(cut) for cut in reversed(job.cuts)]
        caption = f"Go on from one with heterps submit --resume {job.job_id}@STEP"
        yield section("cuts", "Checkpoints", caption, table("Checkpoints", _CUTS, rows))


def attempt_marks(job: Job, history: History) -> Sequence[tuple[float, str]]:
    """Where on a curve over the time in training each attempt but the first began."""
    steps = {one.number: one.from_step for one in job.attempts} | {job.attempt: job.from_step}
    return [
        (run.began_s, f"attempt {run.attempt} from step {steps.get(run.attempt, 0)}")
        for run in history.runs[1:]
    ]


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
