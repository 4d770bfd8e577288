"""HTML and SVG elements as text; every name and value is escaped, for names are a user's input."""

import re
from html import escape
from typing import TypeAlias

Attribute: TypeAlias = str | float | bool | None
Child: TypeAlias = "str | None"

_VOID = frozenset(("meta", "br", "col", "hr"))
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is markup already, and is not escaped again."""

    __slots__ = ()

    def __html__(self) -> str:
        """The same, as template engines ask for it."""
        return str(self)


def text(value: str) -> Markup:
    """Escape what a person wrote; characters that no page may hold become U+FFFD."""
    if isinstance(value, Markup):
        return value
    return Markup(escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", value)))


def tag(element: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element.

    Args:
        element: its name.
        children: texts, escaped unless they are markup; None is left out.
        attributes: `class_` stands for class, and `_` for `-`; None and False are left out.
    """
    parts = [f"<{element}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        name = key.rstrip("_").replace("_", "-")
        parts.append(f" {name}" if value is True else f' {name}="{text(number(value))}"')
    parts.append(">")
    inner = "".join(text(child) for child in children if child is not None)
    if element in _VOID:
        return Markup("".join(parts))
    return Markup(f"{''.join(parts)}{inner}</{element}>")


def join(*children: Child) -> Markup:
    """Return elements one after the other."""
    return Markup("".join(text(child) for child in children if child is not None))


def number(value: Attribute) -> str:
    """An attribute's value, numbers with at most three decimals."""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return str(value)


def share(fraction: float) -> str:
    """A fraction of the width as a percentage, which scales with the page; text does not."""
    return f"{100 * fraction:.2f}%"
