"""The plan as lanes: layers from top to bottom, a lane for each type, a block for each stage."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from heterps.html.markup import Markup, join, share, tag
from heterps.html.palette import Palette
from heterps.html.parts import scrolled, shortened
from heterps.view.decision import offered_type, types_of
from heterps.view.figures import money, per_sample
from heterps.view.plan import layer_names

if TYPE_CHECKING:
    from scheduler import Decision
    from scheduler.problem.plan import PlanStage

_HEAD_PX, _ROW_PX, _GAP_PX = 46, 26, 16
_MOST_ROWS = 48  # layers with a row each; of more, each stage has one
_STAGE_ROW_PX = 30
_FEW_TYPES = 5  # whose blocks have room for more than a number
_LANE_PX = 56  # the least width of a lane; narrower and the chart scrolls
_FIT = 0.88  # of a lane's width is the block's


@dataclass(frozen=True, slots=True)
class _Block:
    stage: "PlanStage"
    number: int
    top: float
    height: float
    rows: tuple[str, ...]
    row_px: float


def lanes(decision: "Decision", palette: Palette) -> Markup:
    """The chart of a decision with stages."""
    types = types_of(decision)
    blocks = tuple(_blocks(decision))
    height = blocks[-1].top + blocks[-1].height + 4
    drawn = [
        *_grounds(decision, palette, types, height),
        *_connections(blocks, types),
        *_choices(decision, blocks, types),
        *(_drawn_block(block, palette, types) for block in blocks),
    ]
    svg = tag(
        "svg",
        tag("title", "The plan: layers over resource types"),
        tag("desc", _described(decision)),
        tag("defs", _arrow()),
        *drawn,
        width="100%",
        height=height,
        role="img",
        class_="figure",
        style=f"min-width:{_LANE_PX * len(types)}px",
    )
    names = tag("div", *_labels(blocks), class_="names", aria_hidden="true")
    chart = tag("div", names, tag("div", svg, class_="lanes-svg"), class_="lanes")
    return scrolled("The plan as lanes", chart)


def _blocks(decision: "Decision") -> Iterator[_Block]:
    names = layer_names(decision)
    each = len(names) <= _MOST_ROWS
    top = float(_HEAD_PX)
    for number, stage in enumerate(decision.stages):
        inside = names[stage.first : stage.last + 1]
        if each:
            rows, row_px = tuple(inside), float(_ROW_PX)
        else:
            many = f"{inside[0]} to {inside[-1]} ({len(inside)} layers)"
            rows, row_px = (many if len(inside) > 1 else inside[0],), float(_STAGE_ROW_PX)
        yield _Block(stage, number, top, row_px * len(rows), rows, row_px)
        top += row_px * len(rows) + _GAP_PX


def _labels(blocks: tuple[_Block, ...]) -> Iterator[Markup]:
    yield tag("div", style=f"height:{_HEAD_PX}px")
    for place, block in enumerate(blocks):
        if place:
            yield tag("div", style=f"height:{_GAP_PX}px")
        for row in block.rows:
            px = f"{block.row_px:g}px"
            yield tag("div", row, title=row, style=f"height:{px};line-height:{px}")


def _grounds(
    decision: "Decision", palette: Palette, types: list[str], height: float
) -> Iterator[Markup]:
    for place, name in enumerate(types):
        yield _lane(decision, palette, name, place, len(types), height)


def _lane(
    decision: "Decision", palette: Palette, name: str, place: int, many: int, height: float
) -> Markup:
    """The ground of a lane, its name, and what of its type is rented."""
    middle = share((place + 0.5) / many)
    units = decision.total_units.get(name, 0)
    kind = offered_type(decision, name)
    price = kind.price_per_hour * units if kind is not None else 0.0
    rented = [f"{units:,}" if units else "not used" if many <= _FEW_TYPES else "-"]
    if units and many <= _FEW_TYPES:
        rented.append(tag("tspan", f" for {money(price)}/h", class_="roomy"))
    most = 18 if many <= _FEW_TYPES else 9
    return tag(
        "g",
        tag(
            "rect",
            x=share((place + 0.02) / many),
            y=0,
            width=share(0.96 / many),
            height=height,
            rx=8,
            class_="lane",
        ),
        tag(
            "text",
            tag("title", name),
            shortened(name, most),
            x=middle,
            y=19,
            text_anchor="middle",
            class_="lane-name",
        ),
        tag(
            "text",
            *rented,
            x=middle,
            y=35,
            text_anchor="middle",
            class_="tick",
        ),
        class_=palette.of(name),
    )


def _connections(blocks: tuple[_Block, ...], types: list[str]) -> Iterator[Markup]:
    """From each stage to the next: down, across, down."""
    middles = {name: share((place + 0.5) / len(types)) for place, name in enumerate(types)}
    for before, after in pairwise(blocks):
        begin, end = middles[before.stage.type], middles[after.stage.type]
        top = before.top + before.height
        middle = top + _GAP_PX / 2
        yield tag("line", x1=begin, x2=begin, y1=top, y2=middle, class_="flow")
        yield tag("line", x1=begin, x2=end, y1=middle, y2=middle, class_="flow")
        yield tag(
            "line",
            x1=end,
            x2=end,
            y1=middle,
            y2=after.top - 1,
            class_="flow",
            marker_end="url(#arrow)",
        )


def _choices(
    decision: "Decision", blocks: tuple[_Block, ...], types: list[str]
) -> Iterator[Markup]:
    """A ring wherever a layer may run as well."""
    if decision.workload is None:
        return
    offered = decision.resources.types if decision.resources is not None else ()
    capacity = {kind.name: kind.memory_bytes for kind in offered}
    for block in blocks:
        rows = decision.workload.layers[block.stage.first : block.stage.last + 1]
        if block.row_px != _ROW_PX:
            return  # a row stands for a whole stage
        for place, layer in enumerate(rows):
            for name, cost in layer.cost.items():
                fits = cost.memory_bytes <= capacity.get(name, float("inf"))
                if name == block.stage.type or name in decision.excluded or not fits:
                    continue
                if decision.pin.get(layer.name, name) != name:
                    continue
                yield tag(
                    "circle",
                    cx=share((types.index(name) + 0.5) / len(types)),
                    cy=block.top + block.row_px * (place + 0.5),
                    r=2.5,
                    class_="ring",
                )


def _drawn_block(block: _Block, palette: Palette, types: list[str]) -> Markup:
    stage, many = block.stage, len(types)
    place = types.index(stage.type)
    left, width = (place + (1 - _FIT) / 2) / many, _FIT / many
    roomy = many <= _FEW_TYPES
    time = f"{per_sample(stage.busy_s)} a sample"
    word = tag("tspan", f" unit{'s' * (stage.units != 1)}", class_="roomy") if roomy else None
    lines: list[Markup] = [tag("tspan", f"{stage.units:,}", word, class_="strong")]
    second = None
    if roomy and block.height > _ROW_PX + 4:
        second = tag(
            "text",
            tag("tspan", "slowest: ", class_="roomy") if stage.bottleneck else None,
            per_sample(stage.busy_s),
            tag("tspan", " a sample", class_="roomy"),
            x=share(left + width / 2),
            y=block.top + block.height / 2 + 14,
            text_anchor="middle",
            class_="block-time",
        )
    elif roomy:
        more = f" · {'slowest' if stage.bottleneck else per_sample(stage.busy_s)}"
        lines.append(tag("tspan", more, class_="roomy"))
    if stage.bottleneck:
        lines.insert(0, tag("tspan", "▲ ", class_="warn"))
    tip = f"stage {block.number}: {stage.units:,} × {stage.type}, {time}"
    slow = " slow" if stage.bottleneck else ""
    return tag(
        "g",
        tag("title", f"{tip}{', the slowest' if stage.bottleneck else ''}"),
        tag(
            "rect",
            x=share(left),
            y=block.top + 1,
            width=share(width),
            height=block.height - 2,
            rx=6,
            class_=f"block{slow}",
        ),
        tag(
            "text",
            *lines,
            x=share(left + width / 2),
            y=block.top + block.height / 2 + (-2 if second else 4),
            text_anchor="middle",
            class_="block-text",
        ),
        second,
        class_=palette.of(stage.type),
    )


def _arrow() -> Markup:
    path = tag("path", d="M0 0L6 3L0 6z", class_="arrow")
    return tag(
        "marker",
        path,
        id="arrow",
        markerWidth=6,
        markerHeight=6,
        refX=5,
        refY=3,
        orient="auto",
        markerUnits="userSpaceOnUse",
    )


def _described(decision: "Decision") -> str:
    names = layer_names(decision)
    return join(
        *(
            f"Stage {number}: {names[stage.first]} to {names[stage.last]} on {stage.units:,} of "
            f"{stage.type}, {per_sample(stage.busy_s)} a sample"
            f"{', the slowest' if stage.bottleneck else ''}. "
            for number, stage in enumerate(decision.stages)
        )
    )
