"""A peer's process, idle until its turn."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.answering import Answer, Answering, PeerError
from bench.ctr.roster import Entry, launch

_START_S, _TURN_S = 300.0, 120.0


class Peer:
    """It has trained its first steps, and answers.

    Args:
        data: the file with the samples.
        home: where other systems are installed.
        folder: for its log and the rows that it hands over.

    Raises:
        PeerError: it is not installed, ended or did not answer.
    """

    def __init__(self, entry: Entry, data: Path, home: Path, folder: Path) -> None:
        self.entry = entry
        self._rows = folder / f"{entry.name}.npy"
        try:
            argv, environment = launch(entry, home)
        except FileNotFoundError as error:
            raise PeerError(str(error)) from None
        argv = [*argv, str(data), str(os.cpu_count() or 1), str(self._rows)]
        self._process = Answering(argv, environment, folder / f"{entry.name}.log")
        try:
            self.losses: Sequence[float] = self._process.ask(_START_S).get("losses", ())
        except PeerError:
            self.close()
            raise

    def rows(self) -> NDArray[np.float32]:
        """What its first steps made of the rows that are checked."""
        found: NDArray[np.float32] = np.load(self._rows)
        return found

    def turn(self, seconds: float, threads: int = 0) -> Answer:
        """Train for so long, on so many threads; what that came to.

        Raises:
            PeerError: it ended or did not answer.
        """
        return self._process.ask(seconds + _TURN_S, seconds=seconds, threads=threads)

    def close(self) -> None:
        """End it; safe to repeat."""
        self._process.close()
