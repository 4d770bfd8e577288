"""What a user types and imports.

    from heterps import Client, Cluster, MoE, SparseEmbedding, load, plan

Importing this package is cheap: a name costs what it needs when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heterps.async_client import AsyncClient as AsyncClient
    from heterps.client import Client as Client
    from heterps.embedded import Cluster as Cluster
    from scheduler import plan as plan
    from workers.layers.embedding_collection import (
        RemoteEmbeddingBagCollection as RemoteEmbeddingBagCollection,
    )
    from workers.layers.embedding_collection import (
        RemoteEmbeddingCollection as RemoteEmbeddingCollection,
    )
    from workers.layers.embedding_config import EmbeddingBagConfig as EmbeddingBagConfig
    from workers.layers.embedding_config import EmbeddingConfig as EmbeddingConfig
    from workers.layers.expert_group import ExpertGroup as ExpertGroup
    from workers.layers.jagged import KeyedJaggedTensor as KeyedJaggedTensor
    from workers.layers.moe import MoE as MoE
    from workers.layers.moe import aux_loss as aux_loss
    from workers.layers.moefy import moefy as moefy
    from workers.layers.reduction import reduce_gradients as reduce_gradients
    from workers.layers.sparse_embedding import SparseEmbedding as SparseEmbedding
    from workers.saved import load as load

_HOMES = {
    "AsyncClient": "heterps.async_client",
    "Client": "heterps.client",
    "Cluster": "heterps.embedded",
    "EmbeddingBagConfig": "workers.layers.embedding_config",
    "EmbeddingConfig": "workers.layers.embedding_config",
    "ExpertGroup": "workers.layers.expert_group",
    "KeyedJaggedTensor": "workers.layers.jagged",
    "MoE": "workers.layers.moe",
    "RemoteEmbeddingBagCollection": "workers.layers.embedding_collection",
    "RemoteEmbeddingCollection": "workers.layers.embedding_collection",
    "SparseEmbedding": "workers.layers.sparse_embedding",
    "aux_loss": "workers.layers.moe",
    "load": "workers.saved",
    "moefy": "workers.layers.moefy",
    "plan": "scheduler",
    "reduce_gradients": "workers.layers.reduction",
}
__all__ = [
    "AsyncClient",
    "Client",
    "Cluster",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "ExpertGroup",
    "KeyedJaggedTensor",
    "MoE",
    "RemoteEmbeddingBagCollection",
    "RemoteEmbeddingCollection",
    "SparseEmbedding",
    "aux_loss",
    "load",
    "moefy",
    "plan",
    "reduce_gradients",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'heterps' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
