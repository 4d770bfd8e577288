"""A colour for each resource type, told apart by people with any colour vision.

The eight hues differ by 18 or more in CIELAB as seen with normal, protan, deutan and tritan vision
(simulated after Machado et al., IEEE TVCG 15(6), 2009), and have a contrast of 3 or more with the
page. Beyond eight they repeat with stripes. Nothing on the page is said by colour alone.
"""

from collections.abc import Iterable, Mapping

from heterps.html.markup import Markup, join, tag

LIGHT = (
    "#2a7fc9",
    "#cc6410",
    "#0d4f45",
    "#bb8866",
    "#663300",
    "#553377",
    "#9988aa",
    "#443399",
)
DARK = (
    "#5aa9ea",
    "#e8923a",
    "#bdeed6",
    "#667755",
    "#ffdd99",
    "#aa7799",
    "#5566cc",
    "#00eeff",
)


class Palette:
    """Class names by type, in the order of the offer."""

    def __init__(self, types: Iterable[str]) -> None:
        self._types: Mapping[str, int] = {name: place for place, name in enumerate(types)}

    def of(self, kind: str) -> str:
        """The class that sets the colour of `kind`."""
        place = self._types.get(kind, 0)
        striped = " striped" if place >= len(LIGHT) else ""
        return f"t{place % len(LIGHT)}{striped}"

    def chip(self, kind: str, text: str | None = None) -> Markup:
        """A type's name with its colour."""
        square = tag("i", class_=f"swatch {self.of(kind)}", aria_hidden="true")
        return tag("span", join(square, text or kind), class_="chip")


def css() -> str:
    """The colours as classes, for either ground."""
    light = "".join(f".t{n}{{--c:{colour}}}" for n, colour in enumerate(LIGHT))
    dark = "".join(f".t{n}{{--c:{colour}}}" for n, colour in enumerate(DARK))
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
