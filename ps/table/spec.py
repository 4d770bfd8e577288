"""What a table is: its spec, checked, and the engine's table made from it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.json_format import MessageToDict

from chassis.near import did_you_mean
from protos.parameter_server_pb2 import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    ScoreSpec,
    SegmentSpec,
    TableSpec,
    TierSpec,
)
from ps.engine import _native
from ps.errors import TableError
from ps.table.checks import check_spec
from ps.table.rules import (
    ADMISSIONS,
    INITIALIZERS,
    MAX_DIM,
    OPTIMIZERS,
    Admission,
    Eviction,
    Score,
    Segment,
)


def make_spec(
    name: str,
    dim: int,
    *,
    optimizer: str = "adagrad",
    learning_rate: float = 0.01,
    initializer: str = "uniform",
    scale: float = 0.01,
    seed: int = 0,
    segments: Sequence[Segment] = (),
    dtype: str = "float32",
    stochastic_rounding: bool = False,
    admission: Admission | None = None,
    eviction: Eviction | None = None,
    score: Score | None = None,
    memory_bytes: int = 0,
    durability: str = "none",
    **hyperparameters: float | bool | None,
) -> TableSpec:
    """A checked spec.

    Args:
        name: letters, digits, `_`, `-` and `.`, at most 128.
        dim: floats a row, of all segments together.
        optimizer: sgd, momentum, adagrad, rowwise_adagrad, adam, adamw or ftrl.
        learning_rate: step size.
        initializer: zeros, uniform in [-scale, scale), or normal with deviation `scale`.
        scale: see initializer.
        seed: with the key it determines a row's first value, on whatever shard.
        segments: columns with an optimizer and initializer of their own, instead of the above.
        dtype: of weights at rest: float32, float16, bfloat16, or int8 with a scale for each row
            and segment. The optimizer's state is always float32.
        stochastic_rounding: round weights at rest up or down at random, so that steps smaller
            than their last digit are not lost.
        admission: when a key that is pushed to gets a row; at once unless given.
        eviction: which rows a shrink removes, and the most rows to hold.
        score: how shows and clicks make a score, for admission, eviction and lazy segments.
        memory_bytes: of each shard; rows beyond it go to disk. 0: all stay in memory.
        durability: none, checkpoint, log or replica: what a shard that dies brings back.
        hyperparameters: of the optimizer, see `ps.table.rules.OPTIMIZERS`: epsilon, beta1, beta2,
            weight_decay, initial_accumulator, momentum, l1, l2, beta, amsgrad; and of any:
            clip_norm, bound, trust_ratio.

    Raises:
        TableError: naming the argument, its value and what was expected.
    """
    if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= MAX_DIM:
        raise TableError(f"table {name!r}: dim={dim!r}; expected an integer of 1 to {MAX_DIM}")
    spec = TableSpec(
        name=name,
        dim=dim,
        dtype="" if dtype == "float32" else dtype,
        stochastic_rounding=stochastic_rounding,
        durability="" if durability == "none" else durability,
    )
    if segments:
        spec.segments.extend(_segment(name, segment) for segment in segments)
    else:
        spec.optimizer.CopyFrom(_optimizer(name, optimizer, learning_rate, hyperparameters))
        spec.initializer.CopyFrom(_initializer(name, initializer, scale, seed))
    if admission is not None:
        spec.admission.CopyFrom(_admission(name, admission))
    if eviction is not None:
        spec.eviction.CopyFrom(EvictionSpec(**asdict(eviction)))
    if score is not None:
        spec.score.CopyFrom(ScoreSpec(**asdict(score)))
    if memory_bytes:
        spec.tier.CopyFrom(TierSpec(memory_bytes=memory_bytes))
    check_spec(spec)
    return spec


def make_table(spec: TableSpec, directory: str = "") -> _native.Table:
    """An empty table of the engine.

    Args:
        spec: checked here again.
        directory: for rows that do not fit the table's `memory_bytes`.

    Raises:
        TableError: a spec that cannot be, or rows on disk without a directory.
    """
    check_spec(spec)
    segments = [
        {
            "dim": segment.dim,
            "optimizer": _fields(segment.optimizer),
            "initializer": _fields(segment.initializer),
            "lazy": segment.lazy,
        }
        for segment in segments_of(spec)
    ]
    if spec.tier.memory_bytes and not directory:
        raise TableError(
            f"table {spec.name!r}: memory_bytes={spec.tier.memory_bytes} needs a directory for "
            "the rows on disk; expected a shard that was started with --data or --disk"
        )
    return _native.Table(
        segments=segments,
        dtype=spec.dtype,
        stochastic=spec.stochastic_rounding,
        admission=_fields(spec.admission),
        score=_fields(spec.score),
        eviction=_fields(spec.eviction),
        memory_bytes=spec.tier.memory_bytes,
        directory=directory if spec.tier.memory_bytes else "",
    )


def segments_of(spec: TableSpec) -> list[SegmentSpec]:
    """The table's segments; the one it is when it names none."""
    if spec.segments:
        return list(spec.segments)
    return [SegmentSpec(dim=spec.dim, optimizer=spec.optimizer, initializer=spec.initializer)]


def wants_usage(spec: TableSpec) -> bool:
    """Whether pushes should say how often each key was shown and clicked."""
    return bool(
        spec.admission.kind in ("count", "bloom", "score")
        or spec.HasField("score")
        or spec.eviction.max_rows
        or any(segment.lazy for segment in spec.segments)
    )


def describe_difference(have: TableSpec, asked: TableSpec) -> str:
    """The fields in which two specs differ, as `field: have, asked`."""
    a, b = _flat(have), _flat(asked)
    fields = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    return "; ".join(f"{k} is {a.get(k)}, asked for {b.get(k)}" for k in fields)


def _optimizer(
    table: str, kind: str, learning_rate: float, given: dict[str, float | bool | None]
) -> OptimizerSpec:
    known = OPTIMIZERS.get(kind)
    if known is None:
        raise TableError(unknown(table, "optimizer", kind, list(OPTIMIZERS)))
    chosen: dict[str, Any] = dict(known)
    for key, value in given.items():
        if value is None:
            continue
        if key not in known:
            raise TableError(
                f"table {table!r}: {key}={value} does not belong to {kind}, which takes "
                f"learning_rate, {', '.join(known)}{did_you_mean(key, list(known))}"
            )
        chosen[key] = value
    try:
        return OptimizerSpec(kind=kind, learning_rate=learning_rate, **chosen)
    except (TypeError, ValueError) as error:
        raise TableError(f"table {table!r}: {error}") from None


def _initializer(table: str, kind: str, scale: float, seed: int) -> InitializerSpec:
    if kind not in INITIALIZERS:
        raise TableError(unknown(table, "initializer", kind, list(INITIALIZERS)))
    if not 0 <= seed < 1 << 64:
        raise TableError(f"table {table!r}: seed={seed}; expected 0 to 2**64 - 1")
    return InitializerSpec(kind=kind, scale=0.0 if kind == "zeros" else scale, seed=seed)


def _segment(table: str, segment: Segment) -> SegmentSpec:
    return SegmentSpec(
        dim=segment.dim,
        optimizer=_optimizer(
            table, segment.optimizer, segment.learning_rate, dict(segment.hyperparameters)
        ),
        initializer=_initializer(table, segment.initializer, segment.scale, segment.seed),
        lazy=segment.lazy,
    )


def _admission(table: str, admission: Admission) -> AdmissionSpec:
    if admission.kind not in ADMISSIONS:
        raise TableError(unknown(table, "admission", admission.kind, list(ADMISSIONS)))
    bloom = admission.kind == "bloom"
    return AdmissionSpec(
        kind=admission.kind,
        threshold=admission.threshold,
        capacity=admission.capacity if bloom else 0,
        false_positive=admission.false_positive if bloom else 0,
        reads=admission.reads,
    )


def _fields(message: Any) -> dict[str, Any]:
    """Every field of a flat message, the unset ones too."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _flat(spec: TableSpec) -> dict[str, object]:
    tree = MessageToDict(
        spec, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    flat: dict[str, object] = {}
    for field, value in tree.items():
        if isinstance(value, dict):
            flat |= {field if k == "kind" else k: v for k, v in value.items()}
        elif field != "name":
            flat[field] = value
    return flat


def unknown(table: str, what: str, value: str, known: list[str]) -> str:
    """The text for a name that is none of `known`."""
    hint = did_you_mean(value, known)
    return f"table {table!r}: unknown {what} {value!r}; expected {', '.join(known)}{hint}"
