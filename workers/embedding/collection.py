"""TorchRec's embedding collections over tables on the parameter servers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ps import ParameterClient
from workers.embedding.config import EmbeddingBagConfig, EmbeddingConfig, as_bag_config, as_config
from workers.embedding.jagged import KeyedJagged, classes_like
from workers.embedding.sparse import gather_rows
from workers.embedding.tables import Lookup, RemoteTables


class RemoteEmbeddingBagCollection(RemoteTables[EmbeddingBagConfig]):
    """TorchRec's EmbeddingBagCollection with its rows on the parameter servers.

    A forward pulls the distinct rows of each table, tables side by side, and pools them; the
    backward pushes their gradients, which the shards' optimizers apply. Each backward is a step
    of its own. It has no parameters, and its state_dict is empty: see `save`. Outputs are
    float32 on the device of the ids. In eval(), and without gradients, missing keys read their
    first value and grow no row.

    Args:
        tables: EmbeddingBagConfigs, of heterps or TorchRec.
        client: of the shards.
        is_weighted: multiply rows by the features' weights; mean divides by the number of values.
        max_staleness: how many earlier batches' gradients a batch's rows may lack. 0 gives the
            rows that a table in this process would give.
        options: what `create_table` takes, for tables whose configs do not say.

    Raises:
        ValueError, TypeError, TableError: a config is wrong, naming its table and field.
        ShardError: a table is there with another spec, or a shard did not answer.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        client: ParameterClient,
        is_weighted: bool = False,
        *,
        max_staleness: int = 0,
        **options: Any,
    ) -> None:
        configs = [as_bag_config(table) for table in tables]
        super().__init__(configs, client, max_staleness, options)
        self._is_weighted = is_weighted

    def is_weighted(self) -> bool:
        """Whether features have weights."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configs."""
        return self.tables

    def forward(self, features: KeyedJagged) -> Any:
        """Pooled rows, [B, sum of the features' dims], as a KeyedTensor.

        Args:
            features: a KeyedJaggedTensor, of heterps or TorchRec; so is what returns.

        Raises:
            ValueError: a feature, or its weights, are not in the batch.
            ShardError: a pull, or an earlier push, failed.
        """
        lookups, rows = self._look_up(features)
        pooled: list[Tensor] = []
        for table, lookup, table_rows in zip(self._tables, lookups, rows, strict=True):
            pooled += self._pool(table, lookup, table_rows)
        pooled = _expanded(features, pooled, [n for t in self._tables for n in t.feature_names])
        dims = [table.embedding_dim for table in self._tables for _ in table.feature_names]
        if len({len(p) for p in pooled}) > 1:
            raise ValueError(
                f"features: {sorted({len(p) for p in pooled})} samples; expected as many in each"
            )
        values = torch.cat(pooled, dim=1)
        return classes_like(features).KeyedTensor(self.embedding_names(), dims, values)

    def _pool(self, table: EmbeddingBagConfig, lookup: Lookup, rows: Tensor) -> list[Tensor]:
        """[B, dim] for each of the table's features."""
        lengths = torch.cat([feature.lengths().reshape(-1) for feature in lookup.features])
        offsets = F.pad(lengths.cumsum(0), (1, 0)).long()
        weights = self._weights(table, lookup) if self._is_weighted else None
        pooled = F.embedding_bag(
            lookup.inverse,
            rows,
            offsets,
            mode="sum" if weights is not None else table.pooling,
            per_sample_weights=weights,
            include_last_offset=True,
        )
        if weights is not None and table.pooling == "mean":
            pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
        sizes = [feature.lengths().numel() for feature in lookup.features]
        return list(pooled.split(sizes))

    def _weights(self, table: EmbeddingBagConfig, lookup: Lookup) -> Tensor:
        parts = []
        for name, feature in zip(table.feature_names, lookup.features, strict=True):
            weights = feature.weights_or_none()
            if weights is None:
                raise ValueError(f"feature {name!r}: no weights; expected them (is_weighted=True)")
            parts.append(weights.float())
        return torch.cat(parts)


class RemoteEmbeddingCollection(RemoteTables[EmbeddingConfig]):
    """TorchRec's EmbeddingCollection with its rows on the parameter servers.

    As `RemoteEmbeddingBagCollection`, but nothing is pooled: for sequences.

    Args:
        tables: EmbeddingConfigs, of heterps or TorchRec; dims may differ.
        client: of the shards.
        need_indices: return the ids as weights.
        max_staleness: how many earlier batches' gradients a batch's rows may lack.
        options: what `create_table` takes, for tables whose configs do not say.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        client: ParameterClient,
        need_indices: bool = False,
        *,
        max_staleness: int = 0,
        **options: Any,
    ) -> None:
        super().__init__([as_config(table) for table in tables], client, max_staleness, options)
        self._need_indices = need_indices

    def forward(self, features: KeyedJagged) -> dict[str, Any]:
        """A row for each value: JaggedTensors of values [N, dim], by embedding name."""
        lookups, rows = self._look_up(features)
        jagged = classes_like(features).JaggedTensor
        found: list[Any] = []
        for lookup, table_rows in zip(lookups, rows, strict=True):
            sizes = [len(feature.values()) for feature in lookup.features]
            values = gather_rows(table_rows, lookup.inverse).split(sizes)
            for feature, part in zip(lookup.features, values, strict=True):
                ids = feature.values() if self._need_indices else None
                found.append(jagged(values=part, lengths=feature.lengths(), weights=ids))
        return dict(zip(self.embedding_names(), found, strict=True))


def _expanded(features: Any, pooled: list[Tensor], names: list[str]) -> list[Tensor]:
    """Samples in full, where TorchRec's features hold equal samples once."""
    inverse = getattr(features, "inverse_indices_or_none", lambda: None)()
    if inverse is None:
        return pooled
    position = {name: index for index, name in enumerate(inverse[0])}
    return [p[inverse[1][position[name]]] for name, p in zip(names, pooled, strict=True)]
