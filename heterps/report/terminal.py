"""The parts that every report is made of."""

from collections.abc import Iterable

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heterps.view.table import Column


def console(*, stderr: bool = False) -> Console:
    """The terminal, or plain text of 80 columns where there is none."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def show(console: Console, *parts: RenderableType) -> None:
    """Print parts one below the other, without padding at the ends of lines in a pipe."""
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    for line in captured.get().splitlines():
        console.print(line.rstrip(), soft_wrap=True)


def next_commands(commands: Iterable[tuple[str, str]]) -> RenderableType:
    """What to type next: command and purpose; commands are never broken over lines."""
    lines = [Text.assemble("  ", (command, "bold"), f"  # {why}") for command, why in commands]
    return Group(heading("Next"), *lines)


def heading(title: str) -> Text:
    """A section's title, with a line free above it."""
    return Text(f"\n{title}", style="bold cyan")


def bullet(text: str) -> RenderableType:
    """One sentence of a list."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(" -", Text(text, overflow="fold"))
    return grid


def indented(what: RenderableType) -> RenderableType:
    """A part under its heading."""
    return Padding(what, (0, 0, 0, 2), expand=False)


def pairs(lines: Iterable[tuple[str, str]]) -> RenderableType:
    """Names and what they are, side by side."""
    grid = Table.grid(padding=(0, 2))
    for name, text in lines:
        grid.add_row(Text(name, style="dim"), Text(text, overflow="fold"))
    return indented(grid)


def table(*columns: str | Column, left: int = 1) -> Table:
    """A table of these columns, as `Column.of` reads them.

    Args:
        left: blanks before a cell; one follows it.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, left), show_edge=False)
    for column in map(Column.of, columns):
        made.add_column(
            column.title,
            justify="right" if column.number else "left",
            overflow="fold",
            no_wrap=column.number or column.whole,
        )
    return made
