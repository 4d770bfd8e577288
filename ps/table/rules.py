"""What a table may be told: optimizers with their defaults, admission, eviction, segments."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_DIM = 16384
_ANY: dict[str, float | bool] = {"clip_norm": 0.0, "bound": 0.0, "trust_ratio": False}
# The hyperparameters of each optimizer besides the learning rate, with their defaults.
OPTIMIZERS: dict[str, dict[str, float | bool]] = {
    "sgd": {"weight_decay": 0.0, **_ANY},
    "momentum": {"momentum": 0.9, "weight_decay": 0.0, **_ANY},
    # A loss is a mean over the batch, so first gradients are tiny: a larger accumulator would
    # freeze the rows.
    "adagrad": {"epsilon": 1e-10, "weight_decay": 0.0, "initial_accumulator": 0.0, **_ANY},
    "rowwise_adagrad": {"epsilon": 1e-10, "weight_decay": 0.0, "initial_accumulator": 0.0, **_ANY},
    "adam": {
        "epsilon": 1e-8,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.0,
        "amsgrad": False,
        **_ANY,
    },
    # As in torch.optim: steps of Adam, and besides them decay of the weights of touched rows.
    "adamw": {
        "epsilon": 1e-8,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "amsgrad": False,
        **_ANY,
    },
    "ftrl": {
        "weight_decay": 0.0,
        "l1": 0.0,
        "l2": 0.0,
        "beta": 1.0,
        "initial_accumulator": 0.0,
        "clip_norm": 0.0,
        "bound": 0.0,
    },
}
INITIALIZERS = ("zeros", "uniform", "normal")
DTYPES = ("float32", "float16", "bfloat16", "int8")
# How values may travel, and the bytes that each takes then.
WIRE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ADMISSIONS = ("count", "bloom", "probability", "score")
DURABILITIES = ("none", "checkpoint", "log", "replica")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Columns of a row under an optimizer of their own, as in Monolith.

    Attributes:
        dim: how many columns.
        optimizer, learning_rate, hyperparameters: as of `ps.table.spec.make_spec`.
        initializer, scale, seed: likewise.
        lazy: the row has these columns only from this score on (its count, in a table without
            scores), and reads zeros before: wide first, vector later, as in Paddle's CTR accessor.
    """

    dim: int
    optimizer: str = "adagrad"
    learning_rate: float = 0.01
    hyperparameters: Mapping[str, float | bool] = field(default_factory=dict)
    initializer: str = "uniform"
    scale: float = 0.01
    seed: int = 0
    lazy: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """When a key that is pushed to gets a row. Before, its gradients are dropped.

    Attributes:
        kind: count (exactly `threshold` times, 34 bytes a waiting key), bloom (at least
            `threshold` times up to 255, in a counting Bloom filter of fixed size), probability
            (`threshold` at each push), or score (of at least `threshold`).
        threshold: see kind.
        capacity: bloom: how many keys are expected.
        false_positive: bloom: the share of keys counted too high at that capacity.
        reads: what a key without a row reads: `initial`, its first value, or `zeros`.
    """

    kind: str
    threshold: float
    capacity: int = 1_000_000
    false_positive: float = 0.01
    reads: str = "initial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """Which rows a shrink removes; a rule at zero is off.

    Attributes:
        ttl_s: rows not pushed to for so many seconds.
        ttl_steps: rows not pushed to for so many steps of the trainer.
        min_norm: rows whose weights have a smaller L2 norm.
        min_score: rows with a lower score.
        max_rows: the most rows a shard holds; it shrinks by itself when it has more.
        order: whom `max_rows` removes first: lfu, the least pushed to, or lru, the longest not.
        every_steps: a job applies the rules but `max_rows` after each so many steps; shards leave
            it to whoever trains.
    """

    ttl_s: int = 0
    ttl_steps: int = 0
    min_norm: float = 0.0
    min_score: float = 0.0
    max_rows: int = 0
    order: str = "lfu"
    every_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """non_click * (shows - clicks) + click * clicks; Paddle's CTR accessor defines it so.

    Attributes:
        non_click: what a show without a click is worth.
        click: what a click is worth.
        decay: shows and clicks are multiplied by it at every shrink that decays.
    """

    non_click: float = 0.1
    click: float = 1.0
    decay: float = 0.98
