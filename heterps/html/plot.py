"""A chart of points and lines over two axes, as wide as the page."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from heterps.html.markup import Markup, join, share, tag
from heterps.html.parts import figure
from heterps.html.scale import Axis

_LEFT, _RIGHT = 0.11, 0.96  # of the width: tick labels of y stand at the left, over the grid
_TOP_PX, _FOOT_PX = 44.0, 40.0
_CLEAR_PX, _CLEAR = 15.0, 0.2  # a label keeps so much room to the others


@dataclass(slots=True)
class Plot:
    """Drawn in the order of calls.

    Args:
        x, y: axes; `x_text` and `y_text` write their ticks.
        height: of the area between the axes, pixels.
    """

    title: str
    description: str
    x: Axis
    y: Axis
    x_name: str
    y_name: str
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]
    height: float = 240.0
    _drawn: list[Markup] = field(default_factory=list)
    _taken: list[tuple[float, float]] = field(default_factory=list)

    def line(self, points: Sequence[tuple[float, float]], class_: str) -> None:
        """A line through points."""
        path = " ".join(f"{100 * self._x(x):.3f},{self._y(y):.3f}" for x, y in points)
        line = tag("polyline", points=path, class_=class_, vector_effect="non-scaling-stroke")
        self._drawn.append(
            tag(
                "svg",
                line,
                viewBox=f"0 0 100 {self._bottom:g}",
                preserveAspectRatio="none",
                width="100%",
                height=self._bottom,
            )
        )

    def upright(self, x: float, class_: str, text: str) -> None:
        """A line from top to bottom at `x`, named at its upper end."""
        at = share(self._x(x))
        anchor = "end" if self._x(x) > 0.6 else "start"
        self._drawn += [
            tag("line", x1=at, x2=at, y1=_TOP_PX, y2=self._bottom, class_=class_),
            tag("text", text, x=at, y=_TOP_PX - 8, text_anchor=anchor, class_="note"),
        ]

    def level(self, y: float, class_: str, text: str) -> None:
        """A line across at `y`, named at its right end."""
        at = self._y(y)
        self._drawn += [
            tag("line", x1=share(_LEFT), x2="100%", y1=at, y2=at, class_=class_),
            tag("text", text, x="100%", y=at - 5, text_anchor="end", class_="note"),
        ]

    def point(self, x: float, y: float, class_: str, radius: float, tip: str) -> None:
        """A point, with what it is for who points at it."""
        self._drawn.append(
            tag(
                "circle",
                tag("title", tip),
                cx=share(self._x(x)),
                cy=self._y(y),
                r=radius,
                class_=class_,
            )
        )

    def label(self, x: float, y: float, text: str, class_: str = "note") -> None:
        """A text beside a point; left out where another stands."""
        at, down = self._x(x), self._y(y)
        if any(abs(at - a) < _CLEAR and abs(down - d) < _CLEAR_PX for a, d in self._taken):
            return
        self._taken.append((at, down))
        after = at < 0.7
        self._drawn.append(
            tag(
                "text",
                text,
                x=share(at),
                y=down,
                dx=11 if after else -11,
                dy=4,
                text_anchor="start" if after else "end",
                class_=class_,
            )
        )

    def draw(self) -> Markup:
        """The chart."""
        axes = [tag("text", self.y_name, x=0, y=12, class_="axis")]
        for tick in self.y.ticks:
            at = self._y(tick)
            axes.append(tag("line", x1=0, x2="100%", y1=at, y2=at, class_="grid"))
            axes.append(tag("text", self.y_text(tick), x=0, y=at - 4, class_="tick"))
        bottom = self._bottom
        axes.append(tag("line", x1=0, x2="100%", y1=bottom, y2=bottom, class_="base"))
        for tick in self.x.ticks:
            place = share(self._x(tick))
            axes.append(tag("line", x1=place, x2=place, y1=bottom, y2=bottom + 4, class_="base"))
            text = self.x_text(tick)
            axes.append(
                tag("text", text, x=place, y=bottom + 17, text_anchor="middle", class_="tick")
            )
        axes.append(
            tag("text", self.x_name, x="100%", y=bottom + 35, text_anchor="end", class_="axis")
        )
        parts: Iterable[Markup] = (join(*axes), *self._drawn)
        return figure(self.title, self.description, parts, bottom + _FOOT_PX)

    @property
    def _bottom(self) -> float:
        return _TOP_PX + self.height

    def _x(self, value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * self.x.at(value)

    def _y(self, value: float) -> float:
        return _TOP_PX + self.height * (1 - self.y.at(value))
