"""What is wrong with the data of a job, in words for its owner."""

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """The data does not match the job: names file, job key, value and what was expected."""

    def __init__(self, where: str, key: str, value: object, expected: str) -> None:
        super().__init__(f"{where}: {key}: got {value!r}, expected {expected}")
        self.where = where
        self.key = key


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint naming the existing columns: the closest one first, at most eight in all."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    shown = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}columns are {shown}"
