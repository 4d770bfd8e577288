"""What is wrong with the data of a job, in words for its owner."""

from collections.abc import Iterable

from chassis.near import nearest


class DataError(ValueError):
    """The data does not match the job: names file, job key, value and what was expected.

    Args:
        row: of the file, from 0; None where it is not about one. It is shown as counted from 1,
            without the header of a text file.
    """

    def __init__(
        self, where: str, key: str, value: object, expected: str, row: int | None = None
    ) -> None:
        at = where if row is None else f"{where}, row {row + 1}"
        super().__init__(f"{at}: {key}: got {value!r}, expected {expected}")
        self.where = where
        self.key = key
        self.row = row


def column_hint(name: str, names: Iterable[str]) -> str:
    """A hint naming the existing columns: the closest one first, at most eight in all."""
    known = list(names)
    near = nearest(name, known)
    shown = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
    hint = f"did you mean {near!r}? " if near else ""
    return f"{hint}columns are {shown}"
