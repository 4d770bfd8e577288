"""What a table is: its spec, checked, and the engine's table made from it."""

import difflib
import math
import re

from google.protobuf.json_format import MessageToDict

from protos.parameter_server_pb2 import InitializerSpec, OptimizerSpec, TableSpec
from ps import _native
from ps.errors import TableError

MAX_DIM = 16384
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")
# The hyperparameters of each optimizer besides the learning rate, with their defaults.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"weight_decay": 0.0},
    "adagrad": {"epsilon": 1e-10, "weight_decay": 0.0, "initial_accumulator": 0.0},
    "adam": {"epsilon": 1e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0},
}
INITIALIZERS = ("zeros", "uniform", "normal")


def make_spec(
    name: str,
    dim: int,
    *,
    optimizer: str = "adagrad",
    learning_rate: float = 0.01,
    epsilon: float | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    weight_decay: float | None = None,
    initial_accumulator: float | None = None,
    initializer: str = "uniform",
    scale: float = 0.01,
    seed: int = 0,
) -> TableSpec:
    """A checked spec.

    Args:
        name: letters, digits, `_`, `-` and `.`, at most 128.
        dim: floats a row.
        optimizer: sgd, adagrad or adam.
        learning_rate: step size.
        epsilon: adagrad (1e-10) and adam (1e-8).
        beta1: adam (0.9).
        beta2: adam (0.999).
        weight_decay: times the weights, added to the gradient (0).
        initial_accumulator: adagrad (0).
        initializer: zeros, uniform in [-scale, scale), or normal with deviation `scale`.
        scale: see initializer.
        seed: with the key it determines a row's first value, on whatever shard.

    Raises:
        TableError: naming the argument, its value and what was expected.
    """
    known = OPTIMIZERS.get(optimizer)
    if known is None:
        raise TableError(_unknown(name, "optimizer", optimizer, list(OPTIMIZERS)))
    given = {
        "epsilon": epsilon,
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": weight_decay,
        "initial_accumulator": initial_accumulator,
    }
    for key, value in given.items():
        if value is not None and key not in known:
            raise TableError(
                f"table {name!r}: {key}={value} does not belong to {optimizer}, which takes "
                f"learning_rate, {', '.join(known)}"
            )
    chosen = known | {k: value for k, value in given.items() if value is not None}
    if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= MAX_DIM:
        raise TableError(f"table {name!r}: dim={dim!r}; expected an integer of 1 to {MAX_DIM}")
    if not 0 <= seed < 1 << 64:
        raise TableError(f"table {name!r}: seed={seed}; expected 0 to 2**64 - 1")
    spec = TableSpec(
        name=name,
        dim=dim,
        optimizer=OptimizerSpec(kind=optimizer, learning_rate=learning_rate, **chosen),
        initializer=InitializerSpec(
            kind=initializer, scale=0.0 if initializer == "zeros" else scale, seed=seed
        ),
    )
    check_spec(spec)
    return spec


def check_spec(spec: TableSpec) -> None:
    """Check a spec that may have come from anywhere.

    Raises:
        TableError: naming the field, its value and what was expected.
    """
    name, o, i = spec.name, spec.optimizer, spec.initializer
    if not _NAME.fullmatch(name):
        raise TableError(
            f"table name {name[:140]!r}; expected 1 to 128 letters, digits, '_', '-' or '.', "
            "not beginning with '-' or '.'"
        )
    if not 1 <= spec.dim <= MAX_DIM:
        raise TableError(f"table {name!r}: dim={spec.dim}; expected 1 to {MAX_DIM}")
    if o.kind not in OPTIMIZERS:
        raise TableError(_unknown(name, "optimizer", o.kind, list(OPTIMIZERS)))
    if i.kind not in INITIALIZERS:
        raise TableError(_unknown(name, "initializer", i.kind, list(INITIALIZERS)))
    for field, value in (
        ("learning_rate", o.learning_rate),
        ("epsilon", o.epsilon),
        ("weight_decay", o.weight_decay),
        ("initial_accumulator", o.initial_accumulator),
        ("scale", i.scale),
    ):
        if not (math.isfinite(value) and 0 <= value <= 1e30):
            raise TableError(f"table {name!r}: {field}={value}; expected a finite number >= 0")
    for field, value in (("beta1", o.beta1), ("beta2", o.beta2)):
        if not 0 <= value < 1:
            raise TableError(f"table {name!r}: {field}={value}; expected 0 <= {field} < 1")


def make_table(spec: TableSpec) -> _native.Table:
    """An empty table of the engine."""
    check_spec(spec)
    o, i = spec.optimizer, spec.initializer
    return _native.Table(
        dim=spec.dim,
        optimizer=o.kind,
        learning_rate=o.learning_rate,
        epsilon=o.epsilon,
        beta1=o.beta1,
        beta2=o.beta2,
        weight_decay=o.weight_decay,
        initial_accumulator=o.initial_accumulator,
        initializer=i.kind,
        scale=i.scale,
        seed=i.seed,
    )


def describe_difference(have: TableSpec, asked: TableSpec) -> str:
    """The fields in which two specs differ, as `field: have, asked`."""
    a, b = _flat(have), _flat(asked)
    fields = [k for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]
    return "; ".join(f"{k} is {a.get(k)}, asked for {b.get(k)}" for k in fields)


def nearest(name: str, known: list[str]) -> str:
    """`; did you mean 'x'?` where one of `known` is close, else an empty string."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _flat(spec: TableSpec) -> dict[str, object]:
    tree = MessageToDict(
        spec, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    flat: dict[str, object] = {"dim": tree["dim"]}
    for part in ("optimizer", "initializer"):
        flat |= {part if k == "kind" else k: v for k, v in tree.get(part, {}).items()}
    return flat


def _unknown(table: str, what: str, value: str, known: list[str]) -> str:
    hint = nearest(value, known)
    return f"table {table!r}: unknown {what} {value!r}; expected {', '.join(known)}{hint}"
