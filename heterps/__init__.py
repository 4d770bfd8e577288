"""What a user types and imports.

    from heterps import Client, Cluster, MoE, SparseEmbedding, load, plan

Importing this package is cheap: a name costs what it needs when it is first used.
"""

from chassis.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "heterps.client.async_client": ("AsyncClient",),
        "heterps.client.client": ("Client",),
        "heterps.cluster.embedded": ("Cluster",),
        "scheduler": ("plan",),
        "workers.embedding.cached_rows": ("CachedRows",),
        "workers.embedding.collection": (
            "RemoteEmbeddingBagCollection",
            "RemoteEmbeddingCollection",
        ),
        "workers.embedding.config": (
            "EmbeddingBagConfig",
            "EmbeddingConfig",
        ),
        "workers.embedding.jagged": ("KeyedJaggedTensor",),
        "workers.embedding.sparse": ("SparseEmbedding",),
        "workers.learning.reduction": ("reduce_gradients",),
        "workers.model.saved": ("load",),
        "workers.moe.group": ("ExpertGroup",),
        "workers.moe.layer": (
            "MoE",
            "aux_loss",
        ),
        "workers.moe.moefy": ("moefy",),
    },
)
