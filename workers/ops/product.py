"""The three products of a linear layer on a CPU, in float32: our kernels, as functions.

Sums depend on no number of threads.
"""

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import native


def forward(rows: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Rows [N, in], weight [out, in], bias [out]: [N, out], with `relu` what a ReLU makes of it."""
    found = rows.new_empty(len(rows), len(weight))
    of_bias = None if bias is None else native(bias)
    threads = torch.get_num_threads()
    _ops.linear_forward(native(rows), native(weight), of_bias, found, relu=relu, threads=threads)
    return found


def grad_input(grad: Tensor, weight: Tensor, rectified: Tensor | None = None) -> Tensor:
    """Grad [N, out], weight [out, in]: [N, in].

    With `rectified`, [N, in], the rows that a ReLU gave, it is the gradient of the ReLU's input.
    """
    found = grad.new_empty(len(grad), weight.shape[1])
    above = None if rectified is None else native(rectified)
    threads = torch.get_num_threads()
    _ops.linear_grad_input(native(grad), native(weight), found, rectified=above, threads=threads)
    return found


def grad_weight(grad: Tensor, rows: Tensor) -> Tensor:
    """Grad [N, out], rows [N, in]: [out, in]."""
    found = grad.new_empty(grad.shape[1], rows.shape[1])
    _ops.linear_grad_weight(native(grad), native(rows), found, torch.get_num_threads())
    return found
