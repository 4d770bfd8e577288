"""Strict reading of a user's mapping: every refusal names file, key, value and what is expected."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from chassis.near import near_or_all
from chassis.yaml_loader import READING_ERRORS, YamlLoader

_REQUIRED: Final = object()
_SHOWN: Final = 200  # characters of a value


class InputError(ValueError):
    """A workload, resources file or planning argument that cannot be used as given."""

    def __init__(self, source: str, key: str, problem: str) -> None:
        super().__init__(": ".join(part for part in (source, key, problem) if part))
        self.source = source
        self.key = key


class Fields:
    """One mapping of a user's file, read key by key.

    Args:
        value: what the file holds at `path`.
        path: dotted key path of the mapping, empty at the top.
        source: the file, empty when there is none.
        keys: every key that may appear.
    """

    def __init__(self, value: object, path: str, source: str, keys: Sequence[str]) -> None:
        self.source = source
        self.path = path
        if not isinstance(value, Mapping):
            raise InputError(
                source, path, f"{shown(value)}: expected a mapping with {', '.join(keys)}"
            )
        for key in value:
            if key not in keys:
                hint = near_or_all(str(key), keys)
                raise InputError(source, self.at(str(key)), f"unknown key{hint}")
        self._value: Mapping[str, Any] = value

    def at(self, key: str) -> str:
        """Return the full path of `key`."""
        return f"{self.path}.{key}" if self.path else key

    def error(self, key: str, expected: str) -> InputError:
        """Return the error that refuses the value of `key`."""
        return InputError(
            self.source, self.at(key), f"{shown(self._value.get(key))}: expected {expected}"
        )

    def _get(self, key: str, default: object, expected: str) -> Any:
        if key in self._value:
            return self._value[key]
        if default is _REQUIRED:
            raise InputError(self.source, self.at(key), f"missing; expected {expected}")
        return default

    def text(self, key: str, default: object = _REQUIRED, allow_empty: bool = False) -> str:
        """Return a string."""
        value = self._get(key, default, "text")
        if not isinstance(value, str) or not (value or allow_empty or key not in self._value):
            raise self.error(key, "text" if allow_empty else "text that is not empty")
        return value

    def number(
        self,
        key: str,
        default: object = _REQUIRED,
        low: float = 0.0,
        high: float = math.inf,
        above: bool = False,
    ) -> float:
        """Return a finite float in [low, high], or in (low, high] when `above`."""
        if high < math.inf:
            expected = f"a number from {low:g} to {high:g}"
        else:
            expected = f"a finite number {'above' if above else 'of at least'} {low:g}"
        value = self._get(key, default, expected)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, expected)
        inside = low < value <= high if above else low <= value <= high
        try:
            number = float(value)
        except OverflowError:  # a whole number beyond all floats
            raise self.error(key, expected) from None
        if not math.isfinite(number) or not inside:
            raise self.error(key, expected)
        return number

    def integer(self, key: str, low: int, high: int, default: object = _REQUIRED) -> int:
        """Return a whole number in [low, high]; 1e6 is taken as 1000000."""
        expected = f"a whole number from {low} to {high}"
        value = self._get(key, default, expected)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, expected)
        return value

    def whole_or_none(self, key: str, low: int, high: int) -> int | None:
        """Return a whole number in [low, high], None where there is none."""
        return None if self._value.get(key) is None else self.integer(key, low, high)

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def items(self, key: str, least: int = 1) -> Sequence[object]:
        """Return a list; one that may be empty may be missing."""
        expected = "a list of at least one item" if least else "a list"
        value = self._get(key, _REQUIRED if least else (), expected)
        if not isinstance(value, list | tuple) or len(value) < least:
            raise self.error(key, expected)
        return value

    def mapping(self, key: str, of: str) -> Mapping[str, object]:
        """Return a mapping of at least one item, from text to `of`."""
        expected = f"a mapping from {of} with at least one entry"
        value = self._get(key, _REQUIRED, expected)
        if not isinstance(value, Mapping) or not value:
            raise self.error(key, expected)
        if not all(isinstance(name, str) and name for name in value):
            raise self.error(key, expected)
        return value


def shown(value: object) -> str:
    """A value as it stands in a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def unique(names: Sequence[str], source: str, path: str) -> None:
    """Refuse a name that appears twice in the list at `path`."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            problem = f"{name!r}: expected a name used once, {path}[{first[name]}] has it too"
            raise InputError(source, f"{path}[{index}].name", problem)
        first[name] = index


class _Loader(YamlLoader):
    """YAML that refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        _refuse_repeats([self.construct_object(key, deep=True) for key, _ in node.value])
        return super().construct_mapping(node, deep)


def _refuse_repeats(keys: Sequence[object]) -> None:
    seen: set[object] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"key {key!r} appears twice in one mapping")
        seen.add(key)


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    _refuse_repeats([key for key, _ in pairs])
    return dict(pairs)


def read_file(path: str | Path) -> object:
    """Return what a JSON or YAML file holds.

    Raises:
        InputError: the file cannot be read or parsed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InputError(str(path), "", f"cannot be read ({reason})") from error
    try:
        if path.suffix.lower() == ".json":
            return json.loads(text, object_pairs_hook=_pairs)
        return yaml.load(text, Loader=_Loader)
    except READING_ERRORS as error:
        reason = " ".join(str(error).split())
        raise InputError(str(path), "", f"expected JSON or YAML: {reason}") from error
