"""The page as a whole."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from chassis.files import replace_file
from heterps.errors import HeterpsError
from heterps.html import palette as colours
from heterps.html.markup import Markup, tag
from heterps.html.palette import Palette
from heterps.html.parts import section
from heterps.page.alternatives import alternatives
from heterps.page.heatmap import heatmap
from heterps.page.inputs import inputs
from heterps.page.lanes import lanes
from heterps.page.measured import measured
from heterps.page.pareto import pareto
from heterps.page.stages import stages
from heterps.page.summary import reasons, relaxations, summary
from heterps.page.training import training
from heterps.view.decision import types_of

if TYPE_CHECKING:
    from heterps.client.records import Job
    from scheduler import Decision

# Whatever a name may hold, the page loads nothing and runs nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def decision_page(decision: "Decision", job: "Job | None" = None) -> str:
    """Return a decision as one HTML page, with what there is of it in pictures.

    Args:
        job: that the decision was made for.
    """
    palette = Palette(types_of(decision))
    name = decision.workload.name if decision.workload is not None else "decision"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"{name}: decision by {decision.method}"),
        tag("style", Markup(style())),
    )
    body = tag(
        "body",
        tag("main", summary(decision, palette, job), *sections(decision, palette)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def with_curve(decision: "Decision") -> "Decision":
    """The decision with its curve of cost against throughput, found now where it was not kept."""
    from scheduler import pareto_of

    if decision.pareto or decision.workload is None or decision.resources is None:
        return decision
    return replace(decision, pareto=pareto_of(decision))


def write_page(decision: "Decision", path: Path, job: "Job | None" = None) -> None:
    """Write the page to a file, in one atomic step.

    Raises:
        HeterpsError: it cannot be written.
    """
    try:
        replace_file(path, decision_page(decision, job))
    except OSError as error:
        raise HeterpsError(f"{path}: cannot be written ({error.strerror})") from None


def sections(decision: "Decision", palette: Palette) -> Iterator[Markup]:
    """The parts of the page below its summary, as far as the decision has them."""
    if decision.relaxations:
        caption = "Each of these alone makes a plan possible; its figures are that plan's."
        yield section("relax", "What would have to change", caption, relaxations(decision))
    if decision.stages:
        caption = (
            "Layers run from top to bottom; a block is a stage, with the units it takes. "
            "A ring marks another type that the layer may run on."
        )
        yield section("plan", "Plan", caption, lanes(decision, palette))
        caption = (
            "Computing (thick) and communicating (thin) overlap, so a stage takes the longer of "
            "the two. The slowest stage sets the pace; slack is how long the others wait for it."
        )
        yield section("stages", "Where the time goes", caption, stages(decision, palette))
    if decision.measured is not None:
        yield section("measured", "Predicted and measured", None, measured(decision, palette))
    if decision.reasons:
        yield section("why", "Why", None, reasons(decision))
    if decision.pareto:
        caption = (
            "No plan is both cheaper and faster than those on the curve. Open points are the best "
            "found, without a proof; small rings are other methods' plans."
        )
        yield section("pareto", "Cost against throughput", caption, pareto(decision))
    if decision.alternatives:
        caption = (
            "The line across the bars is the lower bound: no plan costs less. The gap is how far "
            "a plan lies above it."
        )
        yield section("alternatives", "Alternatives", caption, alternatives(decision))
    if decision.probabilities:
        caption = "The probability that the agent gives each type, along the plan."
        if decision.values:
            caption += " Value is the critic's estimate, before the layer, of the reward to come."
        yield section("agent", "How sure the agent was", caption, heatmap(decision, palette))
    if decision.training:
        yield section("training", "How the agent learned", None, training(decision))
    yield section("inputs", "Inputs", None, inputs(decision, palette))


@cache
def style() -> str:
    """The style sheet, with a class for each colour."""
    return (files("heterps.page") / "style.css").read_text(encoding="utf-8") + colours.css()
