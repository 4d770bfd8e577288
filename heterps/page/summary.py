"""The head of the page: what was decided, in a sentence and a few figures."""

from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.palette import Palette
from heterps.html.parts import table, tiles
from heterps.view import decision as view
from heterps.view import steps
from heterps.view.figures import duration, money, percent, rate
from heterps.view.plan import ESTIMATED, gap_text, notes, rests_on_estimates

if TYPE_CHECKING:
    from heterps.client.records import Job
    from scheduler import Decision

_CHANGES = ("change", ">from", ">to", ">samples/s", ">price an hour", ">cost")


def summary(decision: "Decision", palette: Palette, job: "Job | None") -> Markup:
    """Title, overview, figures, and what the figures are worth."""
    title = decision.workload.name if decision.workload is not None else "Decision"
    where = f"Job {job.job_id}, {job.state}" if job is not None else "Decision"
    return tag(
        "header",
        tag("p", where, class_="eyebrow"),
        tag("h1", title),
        overview(decision, palette),
    )


def overview(decision: "Decision", palette: Palette) -> Markup:
    """What was decided, its figures, and what they are worth; without a title."""
    return join(
        tag("p", *_sentence(decision, palette), class_="verdict"),
        _tiles(decision) if decision.feasible else None,
        *(tag("p", note, class_="aside") for note in [*steps.notes(decision), *notes(decision)]),
    )


def relaxations(decision: "Decision") -> Markup:
    """Changes that make a plan possible."""
    return table("Changes that make a plan possible", _CHANGES, view.relaxations(decision))


def _sentence(decision: "Decision", palette: Palette) -> list[Markup | str]:
    if not decision.feasible:
        return [tag("b", "No plan meets the demands: ", class_="warn"), decision.plan.reason]
    stages = len(decision.stages)
    said: list[Markup | str] = [f"{stages} stage{'s' * (stages != 1)} on "]
    units = list(decision.total_units.items())
    for place, (kind, number) in enumerate(units):
        joint = "" if not place else " and " if place == len(units) - 1 else ", "
        said += [joint, palette.chip(kind, f"{number:,} × {kind}")]
    said.append(f", planned by {decision.method} in {duration(decision.seconds)}.")
    return said


def _tiles(decision: "Decision") -> Markup:
    guess = f"{ESTIMATED}; " if rests_on_estimates(decision) else ""
    floor, cap = decision.min_throughput, decision.max_price_per_hour
    spare = f"floor {rate(floor)}" if floor else "no floor"
    shown = [
        ("cost of the training", money(decision.cost), f"{guess}{gap_text(decision)}"),
        ("samples/s", rate(decision.throughput), guess + spare),
        (
            "an hour",
            money(decision.plan.price_per_hour),
            f"cap {money(cap)}" if cap else "no cap on the price",
        ),
    ]
    if decision.workload is not None:
        seconds = decision.workload.samples / decision.plan.sustained
        shown.append(
            ("for all samples", duration(seconds), f"{decision.workload.samples:,.0f} samples")
        )
    if decision.measured is not None:
        ratio = decision.measured.throughput / decision.throughput
        mark = " (emulated)" if decision.measured.emulated else ""
        measured = rate(decision.measured.throughput)
        shown.append((f"measured samples/s{mark}", measured, f"{percent(ratio)} of predicted"))
    return tiles(shown)


def reasons(decision: "Decision") -> Markup:
    """Why, sentence by sentence."""
    said = (tag("li", text) for text in view.reasons(decision))
    return tag("ul", *said, class_="reasons")
