"""Decisions as JSON: what `--json` prints, and the files that `--export` writes.

The keys are the fields of the records in `scheduler.decision.record`, so a field added there is
written and read without a change here. A number that is not finite is null, and null is read as
infinite.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from chassis.files import replace_file
from scheduler.decision.record import Decision
from scheduler.problem.cost import PlanStage
from scheduler.problem.fields import Fields, InputError
from scheduler.problem.workload import Resources, Workload

# Written for the reader, and computed anew from the rest.
_DERIVED: Mapping[type, tuple[str, ...]] = {PlanStage: ("slack",)}


def to_json(decision: Decision, inputs: bool) -> dict[str, Any]:
    """Return plain values, with workload and resources where `inputs` says so."""
    value = asdict(replace(decision, workload=None, resources=None))
    for stage, slack in zip(value["stages"], decision.slack, strict=True):
        stage["slack"] = slack
    for name in ("workload", "resources"):
        part = getattr(decision, name)
        if inputs and part is not None:
            value[name] = part.to_json()
        else:
            del value[name]
    plain: dict[str, Any] = _plain(value)
    return plain


def from_json(value: object, source: str) -> Decision:
    """Read a decision strictly."""
    decision = _read(Decision, value, "", source)
    assert isinstance(decision, Decision)
    _check(decision, source)
    return decision


def write_file(decision: Decision, path: Path) -> None:
    """Write a decision with its inputs; a reader never sees a half of it."""
    text = json.dumps(decision.to_json(inputs=True), indent=2, allow_nan=False) + "\n"
    try:
        replace_file(path, text)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise InputError(str(path), "", reason) from error


def _read(kind: Any, value: object, path: str, source: str) -> Any:
    """Read a value of a record's annotated type."""
    if kind is Workload or kind is Resources:
        return kind.parse(value, source)
    if is_dataclass(kind):
        return _record(kind, value, path, source)
    origin, arguments = get_origin(kind), get_args(kind)
    if NoneType in arguments:
        inner = next(one for one in arguments if one is not NoneType)
        return None if value is None else _read(inner, value, path, source)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(source, path, value, "a list")
        return tuple(_read(arguments[0], v, f"{path}[{n}]", source) for n, v in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _wrong(source, path, value, "a mapping from text")
        return {key: _read(arguments[1], v, f"{path}.{key}", source) for key, v in value.items()}
    return _scalar(kind, value, path, source)


def _record(kind: Any, value: object, path: str, source: str) -> Any:
    types = _types(kind)
    Fields(value, path, source, (*types, *_DERIVED.get(kind, ())))
    assert isinstance(value, Mapping)
    found = {}
    for one in fields(kind):
        where = f"{path}.{one.name}" if path else one.name
        if one.name in value:
            found[one.name] = _read(types[one.name], value[one.name], where, source)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise InputError(source, where, "missing; expected a decision that was exported")
    return kind(**found)


def _scalar(kind: type, value: object, path: str, source: str) -> Any:
    if kind is float:
        if value is None:
            return math.inf
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):  # type: ignore[arg-type]
            raise _wrong(source, path, value, "a finite number, or null for an infinite one")
        return float(value)  # type: ignore[arg-type]
    if kind is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 0 <= value < 2**63:  # type: ignore[operator]
            raise _wrong(source, path, value, "a whole number of at least 0")
    elif not isinstance(value, kind):
        raise _wrong(source, path, value, "true or false" if kind is bool else "text")
    return value


def _check(decision: Decision, source: str) -> None:
    """Refuse a decision whose parts do not fit together."""
    layers = len(decision.assignment)
    if decision.workload is not None and len(decision.workload.layers) != layers:
        expected = f"a type for each of the {len(decision.workload.layers)} layers"
        raise InputError(source, "assignment", f"{layers} types: expected {expected}")
    names = decision.resources.names if decision.resources is not None else None
    for place, plan in [("", decision)] + [
        (f"alternatives[{n}].", other) for n, other in enumerate(decision.alternatives)
    ]:
        following = 0
        for number, stage in enumerate(plan.stages):
            where = f"{place}stages[{number}]"
            if stage.first != following or not stage.first <= stage.last < layers:
                value = f"layers {stage.first} to {stage.last}"
                expected = f"layers from {following} to at most {layers - 1}"
                raise InputError(source, where, f"{value}: expected {expected}")
            if names is not None and stage.type not in names:
                expected = f"one of {', '.join(names)}"
                raise InputError(source, f"{where}.type", f"{stage.type!r}: expected {expected}")
            following = stage.last + 1
        if plan.stages and following != layers:
            raise InputError(source, f"{place}stages", f"end before layer {layers - 1}")


@cache
def _types(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _wrong(source: str, path: str, value: object, expected: str) -> InputError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return InputError(source, path, f"{shown}: expected {expected}")


def _plain(value: Any) -> Any:
    """What JSON can hold: lists for tuples, null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
