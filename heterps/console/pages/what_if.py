"""What if: a job planned again with a demand, a price or a limit changed, old beside new."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, tag
from heterps.html.palette import Palette
from heterps.html.parts import details, section, table
from heterps.page.lanes import lanes
from heterps.page.summary import relaxations
from heterps.view.changes import Change, compare
from heterps.view.decision import types_of
from heterps.view.figures import money, rate
from heterps.view.plan import gap_text
from scheduler.methods.names import METHODS
from scheduler.problem.fields import InputError

if TYPE_CHECKING:
    from heterps.client.client import Client
    from scheduler import Decision

# Brute force takes hours where it takes more than none.
OFFERED = tuple(name for name in METHODS if name != "brute")
_MOST = 24  # changes that are listed
_ASKED = "ask"  # a form that was sent names it, an empty one does not
Form = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A form as it was filled in; texts by field, and what was ticked."""

    values: Mapping[str, str]
    excluded: Sequence[str]
    sent: bool

    @classmethod
    def of(cls, form: Form, decision: "Decision") -> "WhatIf":
        """Read a form; what it does not name is as the decision has it."""
        sent = _ASKED in form
        decided = _as_decided(decision)
        values = {key: form.get(key, [default])[-1].strip() for key, default in decided.items()}
        excluded = [k for k in form.get("exclude", []) if k] if sent else decision.excluded
        return cls(values, list(excluded), sent)

    @property
    def pins(self) -> dict[str, str]:
        """Types by layer."""
        return {
            key.removeprefix("pin."): kind
            for key, kind in self.values.items()
            if key.startswith("pin.") and kind
        }

    def changes(self, decision: "Decision") -> dict[str, str]:
        """What is asked for that the decision has not, by the keys of `heterps plan --what-if`."""
        before = _as_decided(decision)
        return {
            key: value or "0"
            for key, value in self.values.items()
            if key != "method" and not key.startswith("pin.") and value != before[key]
        }


def plan_anew(client: "Client", decision: "Decision", asked: WhatIf) -> "Decision":
    """Let the scheduler plan what was asked for.

    Raises:
        InputError: a value that cannot be used, with what was expected.
        HeterpsError: the scheduler does not answer, or refuses.
    """
    from scheduler.planning.changes import Question

    question = Question(decision)
    changes = asked.changes(decision)
    if "finish-by" in changes:  # it takes the place of the floor, unless one is asked for as well
        question.change("finish-by", changes.pop("finish-by"))
    for key, value in changes.items():
        question.change(key, value)
    method = asked.values["method"]
    if method not in OFFERED:
        raise InputError("", "method", f"{method!r}: expected one of {', '.join(OFFERED)}")
    return client.plan(
        question.workload,
        question.resources,
        question.min_throughput or None,
        method,
        decision.seed,
        asked.pins or None,
        exclude=asked.excluded,
        max_price_per_hour=question.max_price_per_hour or None,
        finish_by=question.finish_by or None,
    )


def compared(before: "Decision", after: "Decision") -> Markup:
    """What became different: sentences, figures, both plans."""
    from scheduler.planning.what_if import differences

    said = tag("ul", *(tag("li", text) for text in differences(before, after)), class_="reasons")
    changes = compare(before, after)
    columns = ("", ">old", ">new", ">change")
    shown = [one for one in changes.figures if not one.key.startswith("measured.")]
    figures = table("Figures of both plans", columns, [one.row() for one in shown])
    parts = [
        section("told", "What would change", None, said),
        _relaxed(after),
        section("compared", "Old and new", None, figures, *_listed(changes.plan, columns)),
    ]
    palette = Palette(dict.fromkeys([*types_of(before), *types_of(after)]))
    drawn = [
        tag("div", tag("h3", name), lanes(one, palette))
        for name, one in (("Old plan", before), ("New plan", after))
        if one.stages
    ]
    parts.append(section("plans", "Plans", None, tag("div", *drawn, class_="pair")))
    return join(*parts)


def _relaxed(decision: "Decision") -> Markup | None:
    if not decision.relaxations:
        return None
    caption = "Each of these alone makes a plan possible; its figures are that plan's."
    return section("relax", "What would have to change", caption, relaxations(decision))


def _listed(changes: Sequence[Change], columns: Sequence[str]) -> list[Markup]:
    if not changes:
        return []
    rows = [change.row() for change in changes[:_MOST]]
    shown = table("Changes of the plan", columns, rows)
    more = len(changes) - _MOST
    rest = tag("p", f"and {more:,} more", class_="caption") if more > 0 else None
    return [details(f"Layers and units that change: {len(changes)}", shown, rest, opened=True)]


def _as_decided(decision: "Decision") -> dict[str, str]:
    """The fields of the form as the decision has them."""
    floor, cap = decision.min_throughput, decision.max_price_per_hour
    found = {
        "min-throughput": f"{floor:.12g}" if floor else "",
        "max-price": f"{cap:.12g}" if cap else "",
        "finish-by": f"{decision.finish_by:.12g}" if decision.finish_by else "",
        "method": decision.method if decision.method in OFFERED else "exact",
    }
    for kind in decision.resources.types if decision.resources else ():
        found[f"{kind.name}.price"] = f"{kind.price_per_hour:.12g}"
        found[f"{kind.name}.limit"] = str(kind.limit)
    for layer in decision.workload.layers if decision.workload else ():
        found[f"pin.{layer.name}"] = decision.pin.get(layer.name, "")
    return found


def headline(decision: "Decision") -> str:
    """A plan in a line."""
    if not decision.feasible:
        return "no plan meets the demands"
    return (
        f"{money(decision.cost)} at {rate(decision.throughput)} samples/s by {decision.method}; "
        f"{gap_text(decision)}"
    )
