"""What a user types and imports.

    from heterps import Client, Cluster, MoE, SparseEmbedding, load, plan

Importing this package is cheap: a name costs what it needs when it is first used.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))  # a script may lie beside a `chassis` of its own
try:
    from chassis.lazy import attach
except ModuleNotFoundError:
    raise ImportError(
        f"{sys.modules['chassis'].__file__}: imported as 'chassis', where HeterPS needs its own, "
        f"at {_ROOT / 'chassis'}; rename yours, or move it into a package of another name"
    ) from None
finally:
    del sys.path[0]

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "heterps.client.async_client": ("AsyncClient",),
        "heterps.client.client": ("Client",),
        "heterps.cluster.embedded": ("Cluster",),
        "scheduler": ("plan",),
        "ps.table.rules": ("Admission", "Eviction", "Score", "Segment"),
        "workers.data.keys": ("PAD",),
        "workers.embedding.cached_rows": ("CachedRows",),
        "workers.embedding.collection": (
            "RemoteEmbeddingBagCollection",
            "RemoteEmbeddingCollection",
        ),
        "workers.embedding.config": ("EmbeddingBagConfig", "EmbeddingConfig"),
        "workers.embedding.jagged": ("KeyedJaggedTensor",),
        "workers.embedding.sparse": ("SparseEmbedding",),
        "workers.learning.objective": ("loss",),
        "workers.learning.reduction": ("reduce_gradients",),
        "workers.model.chain.hugging_face": ("HuggingFace", "hugging_face"),
        "workers.model.saved.model": ("load",),
        "workers.moe.group": ("ExpertGroup",),
        "workers.moe.layer": ("MoE", "aux_loss"),
        "workers.moe.moefy": ("moefy",),
        "workers.offload.running.offload": ("offload",),
        "workers.offload.training.offload_training": ("offload_training",),
        "workers.offload.experts.pack": ("pack_experts",),
        "workers.stage.running.callbacks": ("TrainingState",),
    },
)
