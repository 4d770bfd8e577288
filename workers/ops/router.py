"""`heterps::router_logits`: a router's logits, in float32 whatever the type of the tokens.

Rounding would reorder close experts, so this product is one of float32, which tensor cores do not
have; by plain arithmetic it takes a tenth of the time of a layer of many small experts on an H200.
A float32 is the sum of three bfloat16 (8 + 8 + 8 bits), products of bfloat16 are exact in float32,
and that is what tensor cores sum in. So bfloat16 tokens on a CUDA device are multiplied by the
three parts side by side (Henry et al., arXiv 1904.06376); they cut off bits where they align what
they sum, so that logits of width 2048 are off by 2e-6 of their size. On a CPU float32 tokens have a
product of ours, whose sums depend neither on how many tokens there are, but for a few, nor on
threads. Everything else is a plain product.

Shapes: T tokens, D width, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.ops import product
from workers.ops.operation import operation


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bfloat16 tensors, falling in size, whose sum is the float32 `x` but for 2^-24 of it."""
    high = x.bfloat16()
    rest = x - high
    middle = rest.bfloat16()
    return high, middle, (rest - middle).bfloat16()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] [K, N] -> float32 [M, N] of bfloat16."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _alike(x: Tensor, weight: Tensor) -> bool:
    return x.is_cpu and x.dtype == weight.dtype == torch.float32


@operation("heterps::router_logits")
def _router_logits(x: Tensor, weight: Tensor) -> Tensor:
    if _alike(x, weight):
        return product.forward(x, weight)
    parts = torch.cat(_parts(weight))  # [3 E, D]
    return _product(x, parts.t()).view(len(x), 3, len(weight)).sum(dim=1)


@_router_logits.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@operation("heterps::router_logits_backward")
def _router_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if _alike(x, weight):
        return product.grad_input(grad, weight), product.grad_weight(grad, x)
    high, middle, low = _parts(grad)
    of_weight = _product(torch.cat((high, middle, low), dim=1).t(), x)
    # What is left out is of 2^-16, and this is rounded to bfloat16.
    pairs = torch.cat((high, high, middle), dim=1)
    weight_high, weight_middle, _ = _parts(weight)
    of_x = pairs @ torch.cat((weight_high, weight_middle, weight_high))
    return of_x, of_weight.view(3, *weight.shape).sum(dim=0)


@_router_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    if torch.is_grad_enabled() and x.dtype == weight.dtype:  # to be differentiated again
        return grad @ weight, grad.t() @ x
    of_x, of_weight = _router_backward(grad, x, weight)
    return of_x, of_weight


_router_logits.register_autograd(_backward, setup_context=_save)


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:  # noqa: N803 (shape suffixes)
    """The product x weight^T [T, E], in float32, of float64 tokens in float64.

    Args:
        x_TD: [T, D], of any floating type.
        weight_ED: [E, D], of any floating type.
    """
    if x_TD.is_cpu and x_TD.dtype != torch.float64 and weight_ED.dtype == torch.float32:
        mine: Tensor = _router_logits(x_TD.float(), weight_ED)
        return mine
    narrow = x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and weight_ED.dtype == torch.float32
    if narrow and torch.cuda.get_device_capability(x_TD.device) >= (8, 0):
        logits: Tensor = _router_logits(x_TD, weight_ED)
        return logits
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    return F.linear(x_TD.to(dtype), weight_ED.to(dtype))
