"""Which files count at a place: one small file names them, and is replaced last, in one step.

Several may write to a place, and any of them may be stopped at any point and go on later. Each
writes under names of its own. Then it replaces the small file, unless another one has done so
since it began: so what the file names is whole, and those who are too late are told. What lay
there before the replacement, and is not named after it, can never count again and may go.

A directory has a lock for the moment of comparing and replacing. An object store has none: there
a writer that is stopped in that very moment can replace a newer save by its own. So there only
what the replaced file named goes at once, and what else nobody names when it is a day old:
whichever of the two stays, its files are there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ps.checkpoint.bounds import read_at_most
from ps.checkpoint.store import Store
from ps.errors import CheckpointError, ReplacedError, not_written


@dataclass(frozen=True, slots=True)
class Switch:
    """The small file of a place, as a writer saw it when it began.

    Attributes:
        store: the place.
        name: of the file.
        most: bytes that it may have.
        seen: its content then; None where there was none.
    """

    store: Store
    name: str
    most: int
    seen: bytes | None

    @classmethod
    def begin(cls, store: Store, name: str, most: int) -> "Switch":
        """Look at a place, before anything is written there.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            return cls(store, name, most, read_small(store, name, most))
        except OSError as error:
            raise CheckpointError(f"{store.url}/{name}: {error.strerror or error}") from None

    def check(self) -> None:
        """Refuse to go on where another writer was faster: what this one has written may be gone.

        Raises:
            ReplacedError: another file lies there than was seen.
        """
        if read_small(self.store, self.name, self.most) != self.seen:
            raise ReplacedError(
                f"{self.store.url}/{self.name}: another one has been written since this one was "
                "begun, and stays; expected one writer at a time"
            )

    def replace(self, content: bytes, is_entry: Callable[[str], bool]) -> "Behind":
        """Make `content` what counts.

        Args:
            content: of the file from now on.
            is_entry: whether a name in the place is of what such a file names.

        Returns:
            What lay there before.

        Raises:
            ReplacedError: another writer was faster; nothing was changed.
            CheckpointError: it cannot be written, or another one keeps the place locked; nothing
                was changed.
            OSError: whether it was replaced is not known.
        """
        path = f"{self.store.url}/{self.name}"
        if len(content) > self.most:
            raise CheckpointError(
                f"{path}: would have {len(content)} bytes; expected at most {self.most}"
            )
        with self.store.alone() as alone:
            self.check()
            entries = tuple(entry for entry in self.store.entries() if is_entry(entry))
            try:
                self.store.replace(self.name, content)
            except OSError as error:
                if alone and read_small(self.store, self.name, self.most) == self.seen:
                    raise not_written(f"{path}: {error.strerror or error}", error) from None
                raise
            if not alone and read_small(self.store, self.name, self.most) != content:
                raise OSError(f"{path}: another one was written at the same time")
        return Behind(entries, alone)


@dataclass(frozen=True, slots=True)
class Behind:
    """What lay at a place when the file that counts was replaced.

    Attributes:
        entries: names; all that the replacement does not name may go where it was made `alone`.
        alone: whoever had begun before is refused for sure.
    """

    entries: tuple[str, ...]
    alone: bool


def read_small(store: Store, name: str, most: int) -> bytes | None:
    """A file's content; None where it is not there.

    Raises:
        OSError: it cannot be read.
        CheckpointError: it is larger than `most`.
    """
    try:
        with store.open(name) as stream:
            return read_at_most(stream, most, f"{store.url}/{name}")
    except FileNotFoundError:
        return None
