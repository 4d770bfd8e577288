"""Records as JSON and as messages: one mapping for every data class of a problem and its plan.

The keys, in JSON and in messages alike, are the fields of the record, so a field added to one is
written and read without a change here. But for these:

- a field with the metadata `FLAT` is a record whose fields stand among those of its owner;
- a field with the metadata `OPTIONAL` that holds its default is left out;
- a field that does not compare (`compare=False`) is no part of the content;
- the keys that a record's `DERIVED` names are written for a reader, and not read;
- in JSON a number that is not finite is null, and null is read as infinite.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from scheduler.problem.fields import Fields, InputError

FLAT: Final = {"flat": True}
OPTIONAL: Final = {"optional": True}

R = TypeVar("R")

_EXPECTED: Final[Mapping[Any, str]] = {
    float: "a finite number, or null for an infinite one",
    int: "a whole number of at least 0",
    bool: "true or false",
    str: "text",
    tuple: "a list",
    Mapping: "a mapping from text",
}


def to_json(record: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return what JSON can hold of a record, but for the fields `without`."""
    return _content(record, True, without)


def to_fields(record: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of the message of the same content, but for those `without`."""
    return _content(record, False, without)


def of_message(message: Message, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of a message in the form that `from_fields` reads."""
    found = {}
    for one in message.DESCRIPTOR.fields:
        if one.name not in without:
            absent = one.has_presence and not message.HasField(one.name)
            found[one.name] = None if absent else _of_message(getattr(message, one.name))
    return found


def from_json(kind: type[R], value: object, source: str = "") -> R:
    """Read a record strictly; a record with a `parse` of its own is read by that.

    Raises:
        InputError: naming `source`, key path, value and what was expected.
    """
    record: R = _Reader(source, finite=True).record(kind, value, "", {})
    return record


def from_fields(kind: type[R], value: Mapping[str, Any], **given: Any) -> R:
    """Return the record of the fields of a message, where a number need not be finite.

    Args:
        given: fields that have been read already.

    Raises:
        InputError: naming key path, value and what was expected.
    """
    record: R = _Reader("", finite=False).record(kind, value, "", given)
    return record


def _content(record: Any, finite: bool, without: Sequence[str] = ()) -> dict[str, Any]:
    kind: Any = type(record)
    form = _form(kind)
    found = {key: get(record) for key, get in form.getters.items()}
    for key in without:
        del found[key]
    for key, default in form.defaults.items():
        if key in found and found[key] == default:
            del found[key]
    for key in form.nested & found.keys():
        found[key] = _plain(found[key], finite)
    if finite:
        for key in form.numbers & found.keys():
            if not math.isfinite(found[key]):
                found[key] = None
    return found


def _plain(value: Any, finite: bool) -> Any:
    if is_dataclass(value):
        return _content(value, finite)
    if isinstance(value, tuple):
        return [_plain(item, finite) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item, finite) for key, item in value.items()}
    if finite and isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _of_message(value: Any) -> Any:
    if isinstance(value, (float, str, int)):
        return value
    if isinstance(value, Message):
        return of_message(value)
    if isinstance(value, Mapping):
        return {key: _of_message(value[key]) for key in sorted(value)}
    return [_of_message(item) for item in value]


@dataclass(frozen=True, slots=True)
class _Part:
    """A field of a record's content."""

    name: str
    type: Any
    flat: bool
    optional: bool
    default: Any

    @property
    def required(self) -> bool:
        return self.default is MISSING


@cache
def _parts(kind: Any) -> tuple[_Part, ...]:
    types = get_type_hints(kind)
    return tuple(
        _Part(
            one.name,
            types[one.name],
            bool(one.metadata.get("flat")),
            bool(one.metadata.get("optional")),
            one.default if one.default_factory is MISSING else one.default_factory(),
        )
        for one in fields(kind)
        if one.compare
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """The keys of a record's content, with how to get their values; which are floats, or nested.

    `defaults` are the values with which a key is left out.
    """

    getters: Mapping[str, Callable[[Any], Any]]
    numbers: frozenset[str]
    nested: frozenset[str]
    defaults: Mapping[str, Any]


@cache
def _form(kind: Any) -> _Form:
    leaves = _leaves(kind)
    types = {key: part.type for key, (_, part) in leaves.items()}
    return _Form(
        {key: attrgetter(path) for key, (path, _) in leaves.items()},
        frozenset(key for key, of in types.items() if of is float),
        frozenset(key for key, of in types.items() if of not in (float, int, str, bool)),
        {key: part.default for key, (_, part) in leaves.items() if part.optional},
    )


def _leaves(kind: Any) -> dict[str, tuple[str, _Part]]:
    """From each key of a record's content to where the value is, and its field."""
    found: dict[str, tuple[str, _Part]] = {}
    for part in _parts(kind):
        if part.flat:
            inner = _leaves(part.type).items()
            found |= {key: (f"{part.name}.{path}", of) for key, (path, of) in inner}
        else:
            found[part.name] = part.name, part
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads values by the annotated types of records."""

    source: str
    finite: bool

    def record(self, kind: Any, value: object, path: str, given: Mapping[str, Any]) -> Any:
        keys = (*_form(kind).getters, *getattr(kind, "DERIVED", ()))
        Fields(value, path, self.source, keys)
        assert isinstance(value, Mapping)
        return self._filled(kind, value, path, given)

    def _filled(
        self, kind: Any, value: Mapping[str, Any], path: str, given: Mapping[str, Any]
    ) -> Any:
        found = dict(given)
        for part in _parts(kind):
            name = part.name
            where = f"{path}.{name}" if path else name
            if name in given:
                continue
            if part.flat:
                found[name] = self._filled(part.type, value, path, {})
            elif name in value:
                found[name] = self._read(part.type, value[name], where)
            elif part.required:
                expected = _EXPECTED[get_origin(part.type) or part.type]
                raise InputError(self.source, where, f"missing; expected {expected}")
        return kind(**found)

    def _read(self, kind: Any, value: object, path: str) -> Any:
        if hasattr(kind, "parse"):
            return kind.parse(value, self.source)
        if is_dataclass(kind):
            return self.record(kind, value, path, {})
        origin, arguments = get_origin(kind), get_args(kind)
        if NoneType in arguments:
            inner = next(one for one in arguments if one is not NoneType)
            return None if value is None else self._read(inner, value, path)
        if origin is tuple:
            if not isinstance(value, list | tuple):
                raise self._wrong(path, value, tuple)
            return tuple(self._read(arguments[0], v, f"{path}[{n}]") for n, v in enumerate(value))
        if origin is Mapping:
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise self._wrong(path, value, Mapping)
            return {key: self._read(arguments[1], v, f"{path}.{key}") for key, v in value.items()}
        return self._scalar(kind, value, path)

    def _scalar(self, kind: type, value: object, path: str) -> Any:
        if kind is float:
            if value is None:
                return math.inf
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self._wrong(path, value, kind)
            if self.finite and not math.isfinite(value):
                raise self._wrong(path, value, kind)
            return float(value)
        if kind is int:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
                raise self._wrong(path, value, kind)
        elif not isinstance(value, kind):
            raise self._wrong(path, value, kind)
        return value

    def _wrong(self, path: str, value: object, kind: Any) -> InputError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return InputError(self.source, path, f"{shown}: expected {_EXPECTED[kind]}")
