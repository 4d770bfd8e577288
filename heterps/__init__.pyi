from heterps.client.async_client import AsyncClient as AsyncClient
from heterps.client.client import Client as Client
from heterps.cluster.embedded import Cluster as Cluster
from scheduler import plan as plan
from workers.embedding.cached_rows import CachedRows as CachedRows
from workers.embedding.collection import RemoteEmbeddingBagCollection as RemoteEmbeddingBagCollection
from workers.embedding.collection import RemoteEmbeddingCollection as RemoteEmbeddingCollection
from workers.embedding.config import EmbeddingBagConfig as EmbeddingBagConfig
from workers.embedding.config import EmbeddingConfig as EmbeddingConfig
from workers.embedding.jagged import KeyedJaggedTensor as KeyedJaggedTensor
from ps.table.rules import Admission as Admission
from ps.table.rules import Eviction as Eviction
from ps.table.rules import Score as Score
from ps.table.rules import Segment as Segment
from workers.data.keys import PAD as PAD
from workers.learning.objective import loss as loss
from workers.embedding.sparse import SparseEmbedding as SparseEmbedding
from workers.learning.reduction import reduce_gradients as reduce_gradients
from workers.model.chain.hugging_face import HuggingFace as HuggingFace
from workers.model.chain.hugging_face import hugging_face as hugging_face
from workers.model.saved.model import load as load
from workers.moe.group import ExpertGroup as ExpertGroup
from workers.moe.layer import MoE as MoE
from workers.moe.layer import aux_loss as aux_loss
from workers.moe.moefy import moefy as moefy
from workers.offload.running.offload import offload as offload
from workers.offload.training.offload_training import offload_training as offload_training
from workers.offload.experts.pack import pack_experts as pack_experts
from workers.stage.running.callbacks import TrainingState as TrainingState

__all__ = [
    "Admission",
    "AsyncClient",
    "CachedRows",
    "Client",
    "Cluster",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "Eviction",
    "ExpertGroup",
    "HuggingFace",
    "KeyedJaggedTensor",
    "MoE",
    "PAD",
    "RemoteEmbeddingBagCollection",
    "RemoteEmbeddingCollection",
    "Score",
    "Segment",
    "SparseEmbedding",
    "TrainingState",
    "aux_loss",
    "hugging_face",
    "load",
    "loss",
    "moefy",
    "offload",
    "offload_training",
    "pack_experts",
    "plan",
    "reduce_gradients",
]
