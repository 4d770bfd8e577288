"""What a batch needs from tables on the parameter servers, and where its gradients go."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ps import ParameterClient
from ps.engine import _native as native
from workers.embedding.config import EmbeddingConfig
from workers.embedding.jagged import Jagged, KeyedJagged
from workers.embedding.traffic import Batch, RowTraffic

T = TypeVar("T")
C = TypeVar("C", bound=EmbeddingConfig)
# More than any pipeline is deep: so many waiting show that forward gets other objects.
PREFETCHED = 32


@dataclass(frozen=True, slots=True)
class Lookup:
    """What one table has to give for a batch.

    Attributes:
        features: its features, in the order of its config.
        inverse: int64 [N], for each of their values the position of its row among the batch's.
    """

    features: list[Jagged]
    inverse: Tensor


@dataclass(frozen=True, slots=True)
class _Asked:
    """A batch whose rows have been asked for."""

    features: KeyedJagged
    lookups: list[Lookup]
    batch: Batch


class RemoteTables(nn.Module, Generic[C]):
    """A module over tables: pulls the rows of its batches, pushes their gradients."""

    def __init__(
        self,
        tables: Sequence[C],
        client: ParameterClient,
        max_staleness: int,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        names = [table.name for table in tables]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tables: {names}; expected one or more, of distinct names")
        if not isinstance(max_staleness, int) or max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness!r}; expected an integer of at least 0")
        self._tables = list(tables)
        self._client = client
        self._traffic = RowTraffic(client, max_staleness)
        self._prefetched: list[_Asked] = []
        # Backward passes through a function only if an input of it requires a gradient.
        self._anchor = torch.zeros((), requires_grad=True)
        for table in tables:
            made = table.table_options(options)
            client.create_table(table.name, table.embedding_dim, **made)

    @property
    def tables(self) -> list[C]:
        """The tables' configs."""
        return list(self._tables)

    def embedding_names(self) -> list[str]:
        """Names of what comes out: a feature's, or `feature@table` where several tables have it."""
        every = [name for table in self._tables for name in table.feature_names]
        return [
            name if every.count(name) == 1 else f"{name}@{table.name}"
            for table in self._tables
            for name in table.feature_names
        ]

    def prefetch(self, features: KeyedJagged) -> None:
        """Begin to pull the rows of a coming batch, as early as `max_staleness` allows.

        Args:
            features: the object that `forward` will be given.

        Raises:
            RuntimeError: many earlier ones have not been given to `forward`.
        """
        if len(self._prefetched) >= PREFETCHED:
            raise RuntimeError(
                f"prefetch: {PREFETCHED} batches wait; expected forward to be given the very "
                "objects that were prefetched: prefetch after .to(device)"
            )
        self._prefetched.append(self._ask(features))

    def pipelined(
        self,
        batches: Iterable[T],
        features: Callable[[T], KeyedJagged] | None = None,
        depth: int = 1,
    ) -> Iterator[T]:
        """The batches, each after the next `depth` ones have been prefetched.

        Args:
            batches: a data loader, say.
            features: finds the sparse features in a batch; by itself it finds them as the batch,
                as its `sparse_features`, or as an element of a tuple, list or dict.
            depth: batches ahead.
        """
        find = find_features if features is None else features
        waiting: deque[tuple[T, KeyedJagged]] = deque()
        try:
            for batch in batches:
                sparse = find(batch)
                self.prefetch(sparse)
                waiting.append((batch, sparse))
                if len(waiting) > depth:
                    yield waiting.popleft()[0]
            while waiting:
                yield waiting.popleft()[0]
        finally:  # those not used, when the loop is left early
            for _, sparse in waiting:
                self._drop(sparse)

    def flush(self) -> None:
        """Wait until every gradient of backward passes so far is applied.

        Raises:
            ShardError, TableError: a push failed.
        """
        self._traffic.flush()

    def save(self, path: str | Path) -> None:
        """Write a checkpoint of all tables on the shards, with every gradient so far."""
        self.flush()
        self._client.save(path)

    def load(self, path: str | Path) -> int:
        """Replace the tables by those of a checkpoint; what was prefetched is forgotten.

        Returns:
            The number of rows loaded.
        """
        self.flush()
        for asked in list(self._prefetched):
            self._drop(asked.features)
        return self._client.load(path)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return "\n".join(
            f"{t.name!r}: dim={t.embedding_dim}, features={list(t.feature_names)}"
            for t in self._tables
        )

    def _look_up(self, features: KeyedJagged) -> tuple[list[Lookup], list[Tensor]]:
        """What each table has to give, and its rows [distinct keys, dim]."""
        asked = self._take_prefetched(features) or self._ask(features)
        device = asked.lookups[0].inverse.device
        if self._learning():
            rows = _PulledRows.apply(  # type: ignore[no-untyped-call]
                self._anchor, self._traffic, asked.batch, device
            )
        else:
            rows = [torch.from_numpy(r).to(device) for r in self._traffic.take(asked.batch, False)]
        return asked.lookups, list(rows)

    def _ask(self, features: KeyedJagged) -> _Asked:
        present = features.to_dict()
        lookups, keys = [], {}
        for table in self._tables:
            for name in table.feature_names:
                if name not in present:
                    raise ValueError(
                        f"table {table.name!r}: feature {name!r} is not in the batch; it has "
                        f"{', '.join(present)}"
                    )
            own = [present[name] for name in table.feature_names]
            ids = torch.cat([feature.values() for feature in own])
            if ids.is_floating_point():
                raise ValueError(f"table {table.name!r}: ids: {ids.dtype}; expected int64")
            distinct, inverse = native.unique(ids.detach().long().cpu().numpy())
            keys[table.name] = distinct
            lookups.append(Lookup(own, torch.from_numpy(inverse).to(ids.device)))
        batch = Batch(keys, self._learning())
        self._traffic.ask(batch)
        return _Asked(features, lookups, batch)

    def _learning(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _take_prefetched(self, features: KeyedJagged) -> _Asked | None:
        for index, asked in enumerate(self._prefetched):
            if asked.features is features:
                return self._prefetched.pop(index)
        return None

    def _drop(self, features: KeyedJagged) -> None:
        asked = self._take_prefetched(features)
        if asked is not None:
            self._traffic.drop(asked.batch)


def find_features(batch: Any) -> KeyedJagged:
    """The sparse features in a batch: itself, its `sparse_features`, or one of its elements.

    Raises:
        TypeError: none is there, or several.
    """
    if hasattr(batch, "sparse_features"):
        return batch.sparse_features  # type: ignore[no-any-return]
    if _is_features(batch):
        return batch  # type: ignore[no-any-return]
    elements = batch.values() if isinstance(batch, Mapping) else batch
    found = [e for e in elements if _is_features(e)] if isinstance(elements, Iterable) else []
    if len(found) != 1:
        raise TypeError(
            f"batch: {type(batch).__name__} with {len(found)} KeyedJaggedTensors; expected one: "
            "say which by pipelined(features=)"
        )
    return found[0]  # type: ignore[no-any-return]


class _PulledRows(torch.autograd.Function):
    """Rows of all tables, whose backward pushes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, traffic: RowTraffic, batch: Batch, device: torch.device
    ) -> tuple[Tensor, ...]:
        ctx.traffic, ctx.batch = traffic, batch
        ctx.set_materialize_grads(False)  # a table that the loss does not use gets no push
        return tuple(torch.from_numpy(r).to(device) for r in traffic.take(batch, True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.traffic.push(ctx.batch, gradients)
        return None, None, None, None


def _is_features(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("keys", "values", "lengths", "to_dict"))
