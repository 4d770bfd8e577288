"""What the sections of the page are built from: sections, tables, bars and figures."""

from collections.abc import Callable, Iterable, Sequence

from heterps.html.markup import Child, Markup, join, share, tag
from heterps.view.table import Column

BAR_PX = 7


def section(key: str, title: str, caption: str | None, *children: Child) -> Markup:
    """A titled part of the page, with one sentence on how to read it."""
    return tag(
        "section",
        tag("h2", title, id=f"{key}-title"),
        tag("p", caption, class_="caption") if caption else None,
        *children,
        id=key,
        aria_labelledby=f"{key}-title",
    )


def table(
    caption: str,
    columns: Sequence[str | Column],
    rows: Iterable[Sequence[Child]],
    marked: Callable[[int], str | None] = lambda row: None,
    stacked: bool = True,
) -> Markup:
    """A table; the first column heads its row.

    Args:
        caption: for those who do not see it.
        columns: as `Column.of` reads them.
        marked: the class of a row.
        stacked: on a phone, each row becomes a card; else the table scrolls sideways.
    """
    read = [Column.of(column) for column in columns]
    head = tag("tr", *(tag("th", c.title, scope="col", class_=_classes(c)) for c in read))
    body = []
    for index, row in enumerate(rows):
        cells = [
            tag(
                "td" if place else "th",
                tag("div", cell) if cell else None,
                scope=None if place else "row",
                class_=_classes(column),
                data_label=column.title if place and cell else None,
            )
            for place, (column, cell) in enumerate(zip(read, row, strict=True))
        ]
        body.append(tag("tr", *cells, class_=marked(index)))
    made = tag(
        "table",
        tag("caption", caption, class_="hidden"),
        tag("thead", head),
        tag("tbody", *body),
        class_="stacked" if stacked else None,
    )
    if stacked:
        return made
    return scrolled(caption, made)


def scrolled(name: str, what: Markup) -> Markup:
    """What may be wider than the page, and then scrolls sideways, also by keyboard."""
    return tag("div", what, class_="scroll", tabindex="0", role="region", aria_label=name)


def tiles(items: Iterable[tuple[str, Child, str]]) -> Markup:
    """Figures in large: name, value and a note of each."""
    made = (
        tag("li", tag("b", value), tag("span", name), tag("small", note) if note else None)
        for name, value, note in items
    )
    return tag("ul", *made, class_="tiles")


def _classes(column: Column) -> str | None:
    return "number" if column.number else "wide" if column.wide else None


def figure(title: str, description: str, drawing: Iterable[Child], height: float) -> Markup:
    """An SVG as wide as the page; x is in percent and y in pixels, so text keeps its size."""
    return tag(
        "svg",
        tag("title", title),
        tag("desc", description),
        *drawing,
        width="100%",
        height=height,
        role="img",
        class_="figure",
    )


def bars(values: Sequence[tuple[float, str, str]], line: float | None = None) -> Markup:
    """Thin bars below each other, for a cell beside the figures themselves.

    Args:
        values: fraction of the width, class and colour's class of each.
        line: fraction at which a line stands.
    """
    height = len(values) * (BAR_PX + 2) + 2
    drawn = [
        tag(
            "rect",
            x=0,
            y=1 + place * (BAR_PX + 2),
            width=share(min(max(fraction, 0.0), 1.0)),
            height=BAR_PX,
            rx=2,
            class_=f"{kind} {colour}",
        )
        for place, (fraction, kind, colour) in enumerate(values)
    ]
    if line is not None:
        x = share(min(line, 1.0))
        drawn.append(tag("line", x1=x, x2=x, y1=0, y2=height, class_="mark"))
    return tag("svg", *drawn, width="100%", height=height, aria_hidden="true", class_="bars")


def details(summary: str, *children: Child, opened: bool = False) -> Markup:
    """A part that is folded away."""
    return tag("details", tag("summary", summary), *children, open=opened)


def pairs(items: Iterable[tuple[str, Child]]) -> Markup:
    """Names and what they are."""
    return tag("dl", *(join(tag("dt", name), tag("dd", value)) for name, value in items))


def shortened(name: str, most: int) -> str:
    """A long name by its two ends."""
    if len(name) <= most:
        return name
    head = (most - 1) * 3 // 5
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"
