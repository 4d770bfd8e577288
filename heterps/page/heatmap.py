"""What the agent thought: how likely it puts each layer on each type, as a heat map."""

from typing import TYPE_CHECKING

from heterps.html.markup import Markup, tag
from heterps.html.palette import Palette
from heterps.html.parts import scrolled
from heterps.view import decision as view

if TYPE_CHECKING:
    from scheduler import Decision


def heatmap(decision: "Decision", palette: Palette) -> Markup:
    """A row a layer, a column a type; the table is the picture."""
    types, rows = view.probabilities(decision)
    if decision.resources is not None:  # the order of the lanes
        types.sort(key=list(decision.resources.names).index)
    with_value = bool(decision.values)
    head = tag(
        "tr",
        tag("th", "layer", scope="col"),
        *(tag("th", palette.chip(name), scope="col") for name in types),
        tag("th", "value", scope="col", class_="number") if with_value else None,
    )
    body = []
    for row in rows:
        cells = [
            tag(
                "td",
                tag("span", f"{row.shares.get(name, 0.0):.0%}"),
                tag("span", ", chosen", class_="hidden") if name == row.chosen else None,
                class_=f"heat {palette.of(name)}{' chosen' if name == row.chosen else ''}",
                style=f"--p:{row.shares.get(name, 0.0):.3f}",
            )
            for name in types
        ]
        if with_value:
            cells.append(tag("td", row.value, class_="number"))
        body.append(tag("tr", tag("th", row.layer, scope="row", title=row.layer), *cells))
    caption = "Probability of each type by layer"
    made = tag(
        "table",
        tag("caption", caption, class_="hidden"),
        tag("thead", head),
        tag("tbody", *body),
        class_="heatmap",
    )
    return scrolled(caption, made)
