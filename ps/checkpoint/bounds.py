"""What a file says is checked for its type and bounded before anything is made of it."""

import json
import math
from typing import Any, BinaryIO

from ps.errors import CheckpointError

MOST_COUNT = (1 << 64) - 1
_CHUNK = 4 << 20


def read_exactly(stream: BinaryIO, size: int, name: str) -> bytes:
    """So many bytes; memory grows with what is there, not with what was said to be.

    Raises:
        CheckpointError: the file ends before.
    """
    data = stream.read(min(size, _CHUNK))
    if len(data) < size:
        parts = bytearray(data)
        while len(parts) < size and (chunk := stream.read(min(size - len(parts), _CHUNK))):
            parts += chunk
        data = bytes(parts)
    if len(data) != size:
        raise CheckpointError(f"{name}: ends early")
    return data


def read_at_most(stream: BinaryIO, most: int, name: str) -> bytes:
    """All bytes of a file.

    Raises:
        CheckpointError: there are more than `most`.
    """
    data = bytearray()
    while chunk := stream.read(_CHUNK):
        data += chunk
        if len(data) > most:
            raise CheckpointError(f"{name}: has over {most} bytes; expected at most so many")
    return bytes(data)


def parse_json(data: bytes, name: str, expected: str) -> "Fields":
    """The object that a file of JSON holds.

    Raises:
        CheckpointError: it is none.
    """
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: {error}; expected {expected}") from None
    return Fields(tree, name)


class Fields:
    """Takes the fields out of an object of JSON, each of the type and size that it must have.

    Args:
        tree: the object.
        where: names it in errors.

    Raises:
        CheckpointError: from each method, naming the field, what it is and what was expected.
    """

    def __init__(self, tree: object, where: str) -> None:
        if not isinstance(tree, dict):
            raise CheckpointError(f"{where}: {_shown(tree)}; expected an object")
        self._left: dict[str, Any] = dict(tree)
        self._where = where

    def default(self, name: str, value: object) -> None:
        """What a field is taken to be where it is lacking."""
        self._left.setdefault(name, value)

    def text(self, name: str, most: int = 1 << 20) -> str:
        """A string."""
        return _text(self._take(name), f"{self._where}: {name}", most)

    def count(self, name: str, least: int = 0, most: int = MOST_COUNT) -> int:
        """A whole number."""
        return _count(self._take(name), f"{self._where}: {name}", least, most)

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, value, "a number")
        try:
            if math.isfinite(value):
                return float(value)
        except OverflowError:
            pass
        raise self.wrong(name, value, "a finite number")

    def counts(self, name: str, most: int) -> tuple[int, ...] | None:
        """Whole numbers up to `most`, or null."""
        value = self._take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list or null")
        return tuple(_count(each, f"{self._where}: {name}", 0, most) for each in value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Strings."""
        return tuple(_text(each, f"{self._where}: {name}", 1 << 10) for each in self._list(name))

    def objects(self, name: str) -> list["Fields"]:
        """Objects."""
        return [
            Fields(each, f"{self._where}: {name}[{index}]")
            for index, each in enumerate(self._list(name))
        ]

    def one(self, name: str) -> "Fields | None":
        """An object, or null."""
        value = self._take(name)
        return None if value is None else Fields(value, f"{self._where}: {name}")

    def mapping(self, name: str) -> dict[str, Any]:
        """An object of which the values may be anything."""
        value = self._take(name)
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return value

    def all_texts(self) -> dict[str, str]:
        """All fields, which are strings."""
        return {name: self.text(name) for name in list(self._left)}

    def all_counts(self) -> dict[str, int]:
        """All fields, which are whole numbers."""
        return {name: self.count(name) for name in list(self._left)}

    def end(self) -> None:
        """Refuse what has not been taken."""
        if self._left:
            raise CheckpointError(f"{self._where}: unknown field {_shown(next(iter(self._left)))}")

    def wrong(self, name: str, value: object, expected: str) -> CheckpointError:
        """The error for a field that is not what it must be."""
        return CheckpointError(f"{self._where}: {name}: {_shown(value)}; expected {expected}")

    def _take(self, name: str) -> Any:
        if name not in self._left:
            raise CheckpointError(f"{self._where}: lacks the field {name!r}")
        return self._left.pop(name)

    def _list(self, name: str) -> list[Any]:
        value = self._take(name)
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value


def _text(value: object, where: str, most: int) -> str:
    if isinstance(value, str) and len(value) <= most:
        try:
            value.encode()  # half a surrogate is no text, and no message could hold it
            return value
        except UnicodeEncodeError:
            pass
    raise CheckpointError(
        f"{where}: {_shown(value)}; expected a string of at most {most} characters"
    )


def _count(value: object, where: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CheckpointError(
            f"{where}: {_shown(value)}; expected a whole number from {least} to {most}"
        )
    return value


def _shown(value: object) -> str:
    """A value in an error: its type alone where it would be long."""
    if isinstance(value, str | float | bool | None) or (
        isinstance(value, int) and value.bit_length() < 256
    ):
        text = repr(value if not isinstance(value, str) else value[:80])
        return text if len(text) <= 90 else text[:90] + "…"
    return f"a value of type {type(value).__name__}"
