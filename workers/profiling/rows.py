"""Embedding rows for the profiler: pulled from and pushed to a real shard, one layer at a time."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ps import ParameterClient
from workers.embedding.sparse import SparseEmbedding, bind_rows, tables_of, unique_keys
from workers.model.chain.graph import StageGraph
from workers.model.chain.lookups import embedding_at, keys_of, sources_by_table


class ShardRows:
    """Rows of the model's embeddings on a shard.

    Args:
        model: its embeddings are told that their rows live elsewhere.
        create: whether to create the tables; one process of several does.
    """

    def __init__(
        self, model: nn.Module, client: ParameterClient, device: torch.device, *, create: bool
    ) -> None:
        self._client = client
        self._device = device
        layers = [module for module in model.modules() if isinstance(module, SparseEmbedding)]
        self._pulled: dict[str, tuple[Tensor, NDArray[np.uint64]]] = {}
        for layer in layers:
            layer.remote = True
        if create:
            for spec in tables_of(layers).values():
                options = {**spec.table_options(), "memory_bytes": 0}  # this shard has no disk
                client.create_table(spec.table, **options)

    def warm(self, graph: StageGraph, values: Mapping[str, Tensor]) -> None:
        """Grow the rows of a layer's keys, so that growth is not what is measured."""
        for table, sources in sources_by_table(graph.module, graph.lookups).items():
            keys, _, _ = unique_keys(keys_of(sources, values).numpy())
            self._client.pull_unique(table, keys)

    def bind(self, graph: StageGraph, values: Mapping[str, Tensor]) -> None:
        """Pull and bind the rows of a layer's embeddings for its next forward."""
        layers = [embedding_at(graph.module, lookup.embedding) for lookup in graph.lookups]
        for table, sources in sources_by_table(graph.module, graph.lookups).items():
            keys, inverse, there = unique_keys(keys_of(sources, values).cpu().numpy())
            rows = torch.from_numpy(self._client.pull_unique(table, keys))
            rows = rows.to(self._device).requires_grad_()
            self._pulled[table] = (rows, keys)
            own = [layer for layer in layers if layer.spec.table == table]
            positions = torch.from_numpy(inverse).to(self._device)
            bind_rows(own, rows, positions, padded=there is not None)

    def learn(self, graph: StageGraph) -> None:
        """Give the rows of a layer gradients, without its having computed any."""
        for table in sources_by_table(graph.module, graph.lookups):
            rows = self._pulled[table][0]
            rows.grad = torch.full_like(rows, 1e-6)

    def drop(self, graph: StageGraph) -> None:
        """Forget the rows of a layer and what they collected since `bind`."""
        for table in sources_by_table(graph.module, graph.lookups):
            self._pulled.pop(table)

    def push(self, graph: StageGraph) -> None:
        """Push what the rows of a layer collected since `bind`."""
        for table in sources_by_table(graph.module, graph.lookups):
            rows, keys = self._pulled.pop(table)
            if rows.grad is not None:
                self._client.push(table, keys, rows.grad.cpu().numpy())

    def bytes_moved(self, graph: StageGraph) -> int:
        """Bytes of the rows that `bind` last pulled for a layer."""
        tables = sources_by_table(graph.module, graph.lookups)
        return sum(self._pulled[table][0].nbytes for table in tables if table in self._pulled)

    def server_seconds(self) -> float:
        """Core seconds that the shard has used so far."""
        return sum(shard.cpu_seconds for shard in self._client.stats())
