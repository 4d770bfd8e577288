"""Columns of a table, in one notation for terminal and page."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """A column's title, and what the cells below it are.

    Attributes:
        number: aligned at the right and, as with `whole`, never broken over lines.
        wide: takes the room that is left; on pages.
    """

    title: str
    number: bool = False
    whole: bool = False
    wide: bool = False

    @classmethod
    def of(cls, text: "str | Column") -> "Column":
        """Read a title: ">" before it marks a number, "!" a whole and "*" a wide column."""
        if isinstance(text, Column):
            return text
        mark = text[:1]
        if mark not in (">", "!", "*"):
            return cls(text)
        return cls(text[1:], number=mark == ">", whole=mark == "!", wide=mark == "*")
