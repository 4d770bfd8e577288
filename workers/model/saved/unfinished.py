"""The folder that a model is saved in until it is complete, and which attempt's it is."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

_WRITER = ".attempt"  # at the job, and generation of its workers, that writes the folder


@dataclass(frozen=True, slots=True)
class Unfinished:
    """OUTPUT.partial, for the model at OUTPUT."""

    folder: Path

    @classmethod
    def of(cls, output: Path) -> "Unfinished":
        """That of a model."""
        return cls(output.with_name(output.name + ".partial"))

    def claim(self, attempt: int, generation: int) -> None:
        """Say whose it is; raises OSError."""
        (self.folder / _WRITER).write_text(f"{attempt}.{generation}")

    def settle(self) -> None:
        """Have it be nobody's, as it is complete; raises OSError."""
        (self.folder / _WRITER).unlink(missing_ok=True)

    def remove(self, attempt: int, generation: int | None = None) -> None:
        """Leave nothing of it, unless others write it; whoever still did would fail.

        Args:
            generation: of the workers that wrote it; None for any of the attempt, which is over.
        """
        with suppress(OSError):
            writer, _, of = (self.folder / _WRITER).read_text().partition(".")
            if writer != str(attempt) or not of.isdecimal() or generation not in (None, int(of)):
                return
            gone = self.folder.with_name(f".{self.folder.name}.{token_hex(4)}")
            os.replace(self.folder, gone)  # at once: no half of it is ever given the model's name
            shutil.rmtree(gone, ignore_errors=True)
