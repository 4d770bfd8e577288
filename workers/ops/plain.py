"""What the ops of a mixture of experts compute, by torch's own: for programs that run elsewhere.

Each expert computes all rows, and those of others are left out: no product of groups, whose sizes
are known late, is taken by every runtime.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from workers.ops.choice_weights import choice_weights_plainly
from workers.ops.gather import gather_rows_plainly, gather_sum_plainly
from workers.ops.grouped_ffn import activate

_Op = Callable[..., Tensor | tuple[Tensor, ...]]


def decompositions() -> dict[OpOverload, _Op]:
    """By operator of ours, what `ExportedProgram.run_decompositions` is to put in its place."""
    ops = torch.ops.heterps
    return {
        ops.router_logits.default: _router_logits,
        ops.route.default: _route,
        ops.group.default: _group,
        ops.choice_weights.default: choice_weights_plainly,
        ops.gather_rows.default: gather_rows_plainly,
        ops.gather_sum.default: gather_sum_plainly,
        ops.grouped_ffn.default: _grouped_ffn,
        ops.routed_ffn.default: _routed_ffn,
    }


def _router_logits(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(weight.dtype) @ weight.t()


def _route(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lowest = torch.finfo(logits.dtype).min
    left = torch.where(logits > lowest, logits, lowest)  # of NaN, too
    picks = []
    for _ in range(k):
        picks.append(left.argmax(dim=1, keepdim=True))  # the first of equal ones
        left = left.scatter(1, picks[-1], -float("inf"))
    chosen = torch.cat(picks, dim=1)
    return chosen.int(), *_group(chosen, logits.shape[1])


def _group(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = chosen.flatten().long()
    number = torch.arange(flat.shape[0], device=flat.device)
    order = (flat * flat.shape[0] + number).argsort()
    bounds = torch.arange(experts + 1, device=flat.device)
    offsets = (flat.unsqueeze(0) < bounds.unsqueeze(1)).sum(dim=1)
    return order, order.argsort(), offsets


def _grouped_ffn(
    rows: Tensor, offsets: Tensor, w1: Tensor, w2: Tensor, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    number = torch.arange(rows.shape[0], device=rows.device)
    out = torch.zeros_like(rows)
    for expert in range(w1.shape[0]):
        own = (number >= offsets[expert]) & (number < offsets[expert + 1])
        given = activate(rows @ w1[expert], activation) @ w2[expert]
        out = torch.where(own.unsqueeze(1), given, out)
    return out, rows.new_empty(0)


def _routed_ffn(
    x: Tensor,
    weights: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    k = weights.shape[1]
    rows = gather_rows_plainly(x, None, inverse, order, k)
    rows, nothing = _grouped_ffn(rows, offsets, w1, w2, activation, keep)
    return gather_sum_plainly(rows, weights, inverse, order, k), nothing, nothing.clone()
