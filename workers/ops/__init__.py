"""Torch ops over the native kernels of `cuda/`; each has a CPU and a CUDA form and a fake one."""

from workers.ops.choice_weights import choice_weights
from workers.ops.embedding import embedding_pool, embedding_update
from workers.ops.gather import gather_rows, gather_sum
from workers.ops.grouped_ffn import FfnAt, grouped_ffn, grouped_ffn_at
from workers.ops.native import native_for
from workers.ops.quantize import dequantize_rows, quantize_rows
from workers.ops.route import Routing, group, route
from workers.ops.routed_ffn import routed_ffn
from workers.ops.router import router_logits
from workers.ops.topk_ffn import topk_ffn

__all__ = [
    "FfnAt",
    "Routing",
    "choice_weights",
    "dequantize_rows",
    "embedding_pool",
    "embedding_update",
    "gather_rows",
    "gather_sum",
    "group",
    "grouped_ffn",
    "grouped_ffn_at",
    "native_for",
    "quantize_rows",
    "route",
    "routed_ffn",
    "router_logits",
    "topk_ffn",
]
