"""Embedding rows for the profiler: pulled from and pushed to a real shard, one layer at a time."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ps import ParameterClient
from ps.engine import _native as native
from workers.embedding.sparse import SparseEmbedding, tables_of
from workers.model.trace import StageGraph


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
        self._layers = {n: m for n, m in model.named_children() if isinstance(m, SparseEmbedding)}
        self._pulled: dict[str, tuple[Tensor, NDArray[np.uint64]]] = {}
        for layer in self._layers.values():
            layer.remote = True
        if create:
            for spec in tables_of(self._layers.values()).values():
                client.create_table(spec.table, **spec.table_options())

    def warm(self, keys_of: Mapping[str, str], values: Mapping[str, Tensor]) -> None:
        """Grow the rows of a batch, so that growth is not what is measured."""
        for name, source in keys_of.items():
            keys, _ = native.unique(values[source].numpy().reshape(-1))
            self._client.pull_unique(self._layers[name].spec.table, keys)

    def bind(self, graph: StageGraph, values: Mapping[str, Tensor]) -> None:
        """Pull and bind the rows of a layer's embeddings for its next forward."""
        for name, source in graph.keys_of.items():
            layer = self._layers[name]
            keys, inverse = native.unique(values[source].cpu().numpy().reshape(-1))
            rows = torch.from_numpy(self._client.pull_unique(layer.spec.table, keys))
            rows = rows.to(self._device).requires_grad_()
            self._pulled[name] = (rows, keys)
            layer.bind(rows, torch.from_numpy(inverse).to(self._device))

    def push(self, graph: StageGraph) -> None:
        """Push what the rows of a layer collected since `bind`."""
        for name in graph.keys_of:
            rows, keys = self._pulled.pop(name)
            if rows.grad is not None:
                self._client.push(self._layers[name].spec.table, keys, rows.grad.cpu().numpy())

    def bytes_moved(self, graph: StageGraph) -> int:
        """Bytes of the rows that `bind` last pulled for a layer."""
        return sum(self._pulled[name][0].nbytes for name in graph.keys_of if name in self._pulled)

    def server_seconds(self) -> float:
        """Core seconds that the shard has used so far."""
        return sum(shard.cpu_seconds for shard in self._client.stats())
