"""Where an iterable of the job's own can go on, as it said itself by `state_dict`."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

_MOST: Final = 1 << 26  # characters of all that are kept of a pass


@dataclass(frozen=True, slots=True)
class Position:
    """Between two samples of a pass.

    Args:
        row: of the sample that follows.
        state: what `state_dict` gave then, as `states.encoded`.
        digest: of the sample that follows: what goes on elsewhere is found out.
        rows: of a whole pass; 0 where no pass has ended yet.
    """

    row: int
    state: Any
    digest: str
    rows: int = 0

    def written(self) -> str:
        """As JSON in one line."""
        return json.dumps(asdict(self))


class Positions:
    """Those that are known of one iterable; where states grow too many, fewer of them.

    Args:
        file: by which the processes of a host tell each other; None: there is one.

    Attributes:
        rows: of a pass; 0 until one has ended.
        sparsity: how many times as many samples as at first should lie between two.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._told = 0  # bytes of the file that have been read
        self._found: dict[int, Position] = {0: Position(0, None, "")}
        self._sizes: dict[int, int] = {0: 0}
        self.rows = 0
        self.sparsity = 1

    @property
    def last(self) -> int:
        """The row of the last one."""
        return max(self._found)

    def add(self, position: Position) -> None:
        """Tell of one, or, where its row is 0, of the rows of a pass alone."""
        line = f"{position.written()}\n".encode()
        self._take(position, len(line))
        if self._file is not None:
            with suppress(OSError), self._file.open("ab", buffering=0) as file:
                file.write(line)  # at once: others write lines there, too

    def before(self, row: int) -> Position:
        """The last one that is not behind a row; the beginning where there is no other."""
        if self._file is not None:
            with suppress(OSError), self._file.open("rb") as file:
                file.seek(self._told)
                whole, end, _ = file.read().rpartition(b"\n")
                self._told += len(whole) + len(end)
                for line in whole.splitlines():
                    self._take(Position(**json.loads(line)), len(line))
        return self._found[max(known for known in self._found if known <= row)]

    def _take(self, position: Position, size: int) -> None:
        self.rows = max(self.rows, position.rows)
        if position.row in self._found:
            return
        self._found[position.row], self._sizes[position.row] = position, size
        if sum(self._sizes.values()) <= _MOST:
            return
        self.sparsity *= 2
        first, *others = sorted(self._found)
        kept = {first, *others[1::2], others[-1]}
        self._found = {row: one for row, one in self._found.items() if row in kept}
        self._sizes = {row: size for row, size in self._sizes.items() if row in kept}
