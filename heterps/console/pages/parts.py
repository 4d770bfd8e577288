"""Small parts that several pages share: states, bars, times."""

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from heterps.client.attempts import trained
from heterps.client.records import Job, State
from heterps.html.markup import Markup, tag
from heterps.view.figures import money

if TYPE_CHECKING:
    from scheduler import Decision

_COARSE_S = 60.0


def state_chip(state: State) -> Markup:
    """A state with its colour; the word alone says it."""
    return tag("span", str(state), class_=f"state {state}")


def progress(job: Job) -> Markup | None:
    """How far the training is, as a bar and a share; None before it has begun."""
    if not job.total_steps:
        return None
    done = min(job.step / job.total_steps, 1.0)
    return tag(
        "span",
        tag("progress", value=job.step, max=job.total_steps, aria_label=f"{job.name} trained"),
        tag("span", f"{done:.0%}", class_="share"),
        class_="done",
    )


def ago(at: float) -> Markup:
    """How long ago, with the date for who points at it."""
    passed = max(0.0, time.time() - at)
    days, hours = divmod(passed / 3600, 24)
    text = f"{days:.0f} d {hours:.0f} h" if days >= 1 else _coarse(passed)
    return tag("time", text, title=clock(at), datetime=_iso(at))


def clock(at: float) -> str:
    """A date and a time, in UTC as the scheduler may be anywhere."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def spent(job: Job, price_per_hour: float) -> float:
    """Dollars that a job's units have cost while it trained, over all attempts.

    Args:
        price_per_hour: of the latest one's plan.
    """
    return sum(one.cost for one in trained(job, price_per_hour))


def cost_text(job: Job, decision: "Decision | None") -> str:
    """What a job has cost, of what was predicted."""
    if decision is None or not decision.feasible:
        return ""
    paid = spent(job, decision.plan.price_per_hour)
    if decision.measured is not None and not job.attempts:
        paid = decision.measured.cost
    return f"{money(paid)} of {money(decision.cost)}"


def _coarse(seconds: float) -> str:
    """An age need not tick: whole seconds, of what is older whole minutes."""
    if seconds < _COARSE_S:
        return f"{int(seconds)} s"
    hours, minutes = divmod(int(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
