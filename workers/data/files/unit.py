"""The parts of files that are read by themselves."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Unit:
    """The rows that can be reached without reading others, such as a row group.

    Args:
        part: by which its format finds them in the file; None: they are all of the file.
        rows: None where these are known only once the file has been read.
        first: rows of the file before it.
    """

    path: Path
    part: int | None
    rows: int | None
    first: int = 0
