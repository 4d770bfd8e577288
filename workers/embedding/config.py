"""What a remote embedding table is, in TorchRec's words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

POOLINGS = ("sum", "mean")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """A table and the features that look it up.

    Its rows are made when their keys are first seen, so keys are any 64-bit integers.

    Args:
        name: the table's name on the shards. Tables of one name are one table.
        embedding_dim: floats a row.
        feature_names: features that look it up; the name when none are given.
        num_embeddings: limits nothing. Where no initializer is given, rows begin uniform within
            sqrt(1 / num_embeddings), as TorchRec's do.
        initializer: zeros | uniform | normal.
        scale: half-width of the interval, or standard deviation.
        optimizer: sgd | adagrad | adam | ..., applied where the row lives.
        learning_rate: of that optimizer.
        options: everything else that `ParameterClient.create_table` takes.
    """

    name: str
    embedding_dim: int
    feature_names: Sequence[str] = ()
    num_embeddings: int | None = None
    initializer: str | None = None
    scale: float | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.feature_names, str):
            raise ValueError(
                f"table {self.name!r}: feature_names={self.feature_names!r}; "
                "expected a list of names"
            )
        names = tuple(self.feature_names) or (self.name,)
        if len(set(names)) < len(names):
            raise ValueError(f"table {self.name!r}: feature_names={names}; expected distinct names")
        object.__setattr__(self, "feature_names", names)

    def table_options(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `create_table`, name and dim aside; `defaults` give way."""
        given = {
            "initializer": self.initializer,
            "scale": self.scale,
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
        }
        own: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
        if self.num_embeddings and not {"initializer", "scale"} & (own.keys() | defaults.keys()):
            own |= {"initializer": "uniform", "scale": math.sqrt(1 / self.num_embeddings)}
        return {**defaults, **own, **self.options}


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """A table whose rows are pooled over each bag; `pooling` is sum or mean."""

    pooling: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in POOLINGS:
            raise ValueError(
                f"table {self.name!r}: pooling={self.pooling!r}; expected {' or '.join(POOLINGS)}"
            )


def as_config(config: Any) -> EmbeddingConfig:
    """An EmbeddingConfig from one, or from TorchRec's.

    Raises:
        TypeError: it is neither.
        ValueError: its initial values cannot be made on the shards.
    """
    return config if isinstance(config, EmbeddingConfig) else EmbeddingConfig(**_fields(config))


def as_bag_config(config: Any) -> EmbeddingBagConfig:
    """An EmbeddingBagConfig from one, or from TorchRec's; raises as `as_config` does."""
    if isinstance(config, EmbeddingBagConfig):
        return config
    fields = _fields(config)
    pooling = getattr(config, "pooling", None)
    if pooling is None:
        raise TypeError(f"table {config.name!r}: {type(config).__name__} has no pooling")
    # TorchRec's is an enum whose values are the names in capitals.
    return EmbeddingBagConfig(**fields, pooling=str(getattr(pooling, "value", pooling)).lower())


def _fields(config: Any) -> dict[str, Any]:
    needed = ("name", "embedding_dim", "feature_names", "num_embeddings")
    if not all(hasattr(config, key) for key in needed):
        raise TypeError(
            f"tables: {type(config).__name__}; expected an EmbeddingBagConfig or EmbeddingConfig "
            "of heterps or TorchRec"
        )
    fields = {key: getattr(config, key) for key in needed}
    return fields | _initial_values(config)


def _initial_values(config: Any) -> dict[str, Any]:
    """The initializer and scale that do what the config's `init_fn` does."""
    function: Any = getattr(config, "init_fn", None)
    if function is None:
        return {}
    arguments: dict[str, Any] = {}
    if isinstance(function, partial) and not function.args:
        function, arguments = function.func, function.keywords
    if function is torch.nn.init.uniform_:
        low, high = arguments.get("a", 0.0), arguments.get("b", 1.0)
        if math.isclose(low, -high) and high >= 0:
            return {"initializer": "uniform", "scale": high}
        what = f"uniform in [{low:g}, {high:g})"
    elif function is torch.nn.init.normal_ and not arguments.get("mean"):
        return {"initializer": "normal", "scale": arguments.get("std", 1.0)}
    elif function is torch.nn.init.zeros_:
        return {"initializer": "zeros"}
    else:
        what = f"init_fn={function!r}"
    raise ValueError(
        f"table {config.name!r}: initial values: {what}; the shards make zeros, normal around "
        "zero, or uniform around zero: use heterps.EmbeddingBagConfig(initializer=, scale=)"
    )
