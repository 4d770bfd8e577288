"""Checks of a table's spec that may have come from anywhere."""

import math
import re
from collections.abc import Iterable

from protos.parameter_server_pb2 import InitializerSpec, OptimizerSpec, TableSpec
from ps.errors import TableError
from ps.table.rules import (
    ADMISSIONS,
    DTYPES,
    DURABILITIES,
    INITIALIZERS,
    MAX_DIM,
    OPTIMIZERS,
    WIRE_BYTES,
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
_MAX_SEGMENTS = 64


def check_spec(spec: TableSpec) -> None:
    """Check every field.

    Raises:
        TableError: naming the field, its value and what was expected.
    """
    if not _NAME.fullmatch(spec.name):
        raise TableError(
            f"table name {spec.name[:140]!r}; expected 1 to 128 letters, digits, '_', '-' or '.', "
            "not beginning with '-' or '.'"
        )
    name = f"table {spec.name!r}"
    if not 1 <= spec.dim <= MAX_DIM:
        raise TableError(f"{name}: dim={spec.dim}; expected 1 to {MAX_DIM}")
    _one_of(name, "dtype", spec.dtype or "float32", DTYPES)
    _one_of(name, "durability", spec.durability or "none", DURABILITIES)
    _check_segments(name, spec)
    _check_admission(name, spec)
    e, s = spec.eviction, spec.score
    _amounts(name, [("min_norm", e.min_norm), ("min_score", e.min_score)])
    _one_of(name, "order", e.order or "lfu", ("lfu", "lru"))
    if spec.HasField("score"):
        _amounts(name, [("non_click", s.non_click), ("click", s.click)])
        if not 0 < s.decay <= 1:
            raise TableError(f"{name}: decay={s.decay}; expected 0 < decay <= 1")
        if s.non_click == s.click == 0:
            raise TableError(f"{name}: a score with non_click=0 and click=0 is always zero")
    if e.min_score and not spec.HasField("score") and not e.max_rows:
        raise TableError(f"{name}: min_score={e.min_score} needs a score")
    if 0 < spec.tier.memory_bytes < 1 << 16:
        raise TableError(
            f"{name}: memory_bytes={spec.tier.memory_bytes}; expected 0 or at least {1 << 16}"
        )


def check_wire(table: str, wire: str) -> None:
    """Check how rows of a table are to travel.

    Raises:
        TableError: naming it, its value and what was expected.
    """
    _one_of(f"table {table!r}", "wire", wire, WIRE_BYTES)


def value_bytes(where: str, dtype: str) -> int:
    """What each value takes in a message whose head says `dtype`; "": float32.

    Raises:
        TableError: naming `where`, the dtype and what was expected.
    """
    dtype = dtype[:40] or "float32"
    _one_of(where, "dtype", dtype, WIRE_BYTES)
    return WIRE_BYTES[dtype]


def _check_segments(name: str, spec: TableSpec) -> None:
    if not spec.segments:
        _check_optimizer(name, spec.optimizer)
        _check_initializer(name, spec.initializer)
        return
    if spec.HasField("optimizer") or spec.HasField("initializer"):
        raise TableError(f"{name}: has segments, so its optimizer and initializer are theirs")
    if len(spec.segments) > _MAX_SEGMENTS:
        raise TableError(f"{name}: {len(spec.segments)} segments; expected at most {_MAX_SEGMENTS}")
    for index, segment in enumerate(spec.segments):
        where = f"{name}: segment {index}"
        if not 1 <= segment.dim <= MAX_DIM:
            raise TableError(f"{where}: dim={segment.dim}; expected 1 to {MAX_DIM}")
        _amounts(where, [("lazy", segment.lazy)])
        _check_optimizer(where, segment.optimizer)
        _check_initializer(where, segment.initializer)
    total = sum(segment.dim for segment in spec.segments)
    if total != spec.dim:
        raise TableError(f"{name}: dim={spec.dim}; its segments have {total} together")
    if all(segment.lazy > 0 for segment in spec.segments):
        raise TableError(f"{name}: all segments are lazy; expected one that is always held")
    if len({segment.lazy for segment in spec.segments if segment.lazy > 0}) > 1:
        raise TableError(f"{name}: lazy segments with several thresholds; expected one")


def _check_optimizer(name: str, o: OptimizerSpec) -> None:
    _one_of(name, "optimizer", o.kind, OPTIMIZERS)
    _amounts(
        name,
        [
            (field, getattr(o, field))
            for field in (
                *("learning_rate", "epsilon", "weight_decay", "initial_accumulator", "l1", "l2"),
                *("beta", "clip_norm", "bound"),
            )
        ],
    )
    for field in ("beta1", "beta2", "momentum"):
        value = getattr(o, field)
        if not 0 <= value < 1:
            raise TableError(f"{name}: {field}={value}; expected 0 <= {field} < 1")
    if o.kind == "ftrl" and o.trust_ratio:
        raise TableError(f"{name}: trust_ratio=true does not go with ftrl, which has no step")
    if o.kind == "ftrl" and o.learning_rate == 0:
        raise TableError(f"{name}: learning_rate=0; ftrl divides by it")


def _check_initializer(name: str, i: InitializerSpec) -> None:
    _one_of(name, "initializer", i.kind, INITIALIZERS)
    _amounts(name, [("scale", i.scale)])


def _check_admission(name: str, spec: TableSpec) -> None:
    a = spec.admission
    if not spec.HasField("admission"):
        return
    _one_of(name, "admission", a.kind, ADMISSIONS)
    _one_of(name, "reads", a.reads or "initial", ("initial", "zeros"))
    highest = {"probability": 1.0, "bloom": 255.0}.get(a.kind, 1e9)
    if not 0 < a.threshold <= highest:
        raise TableError(
            f"{name}: admission by {a.kind} with threshold={a.threshold}; expected above 0, at "
            f"most {highest:g}"
        )
    if a.kind == "score" and not spec.HasField("score"):
        raise TableError(f"{name}: admission by score needs a score")
    if a.kind == "bloom":
        if not 1 <= a.capacity <= 1 << 36:
            raise TableError(f"{name}: capacity={a.capacity}; expected 1 to 2**36 keys")
        if not 1e-9 <= a.false_positive < 1:
            raise TableError(
                f"{name}: false_positive={a.false_positive}; expected 1e-9 <= rate < 1"
            )


def _amounts(name: str, values: Iterable[tuple[str, float]]) -> None:
    for field, value in values:
        if not (math.isfinite(value) and 0 <= value <= 1e30):
            raise TableError(f"{name}: {field}={value}; expected a finite number >= 0")


def _one_of(name: str, field: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise TableError(f"{name}: unknown {field} {value!r}; expected {', '.join(known)}")
