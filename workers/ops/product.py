"""The three products of a linear layer on a CPU, in float32: our kernels, as functions.

Sums depend on no number of threads.
"""

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import native


def forward(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows [N, in], weight [out, in], bias [out]: [N, out]."""
    found = rows.new_empty(len(rows), len(weight))
    of_bias = None if bias is None else native(bias)
    _ops.linear_forward(native(rows), native(weight), of_bias, found, torch.get_num_threads())
    return found


def grad_input(grad: Tensor, weight: Tensor) -> Tensor:
    """Grad [N, out], weight [out, in]: [N, in]."""
    found = grad.new_empty(len(grad), weight.shape[1])
    _ops.linear_grad_input(native(grad), native(weight), found, threads=torch.get_num_threads())
    return found


def grad_weight(grad: Tensor, rows: Tensor) -> Tensor:
    """Grad [N, out], rows [N, in]: [out, in]."""
    found = grad.new_empty(grad.shape[1], rows.shape[1])
    _ops.linear_grad_weight(native(grad), native(rows), found, torch.get_num_threads())
    return found
