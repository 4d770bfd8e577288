"""What the ops of a mixture of experts compute, by torch's own: for programs that run elsewhere.

Each expert computes all rows, and those of others are left out: no product of groups, whose sizes
are known late, is taken by every runtime.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload

from workers.ops.grouped_ffn import activate

_Op = Callable[..., Tensor | tuple[Tensor, ...]]


def decompositions() -> dict[OpOverload, _Op]:
    """By operator of ours, what `ExportedProgram.run_decompositions` is to put in its place."""
    ops = torch.ops.heterps
    return {
        ops.route.default: _route,
        ops.gather_rows.default: _gather_rows,
        ops.gather_sum.default: _gather_sum,
        ops.grouped_ffn.default: _grouped_ffn,
    }


def _route(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lowest = torch.finfo(logits.dtype).min
    left = torch.where(logits > lowest, logits, lowest)  # of NaN, too
    picks = []
    for _ in range(k):
        picks.append(left.argmax(dim=1, keepdim=True))  # the first of equal ones
        left = left.scatter(1, picks[-1], -float("inf"))
    chosen = torch.cat(picks, dim=1)
    flat = chosen.flatten()
    number = torch.arange(flat.shape[0], device=flat.device)
    order = (flat * flat.shape[0] + number).argsort()
    bounds = torch.arange(logits.shape[1] + 1, device=flat.device)
    offsets = (flat.unsqueeze(0) < bounds.unsqueeze(1)).sum(dim=1)
    return chosen.int(), order, order.argsort(), offsets


def _gather_rows(
    x: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int
) -> Tensor:
    rows = x[order // k]
    if weights is None:
        return rows
    return (rows * weights.reshape(-1)[order].unsqueeze(1)).to(x.dtype)


def _gather_sum(
    rows: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int
) -> Tensor:
    kept = (inverse >= 0).unsqueeze(1)
    picked = torch.where(kept, rows[inverse.clamp(min=0)], 0).reshape(-1, k, rows.shape[1])
    if weights is not None:
        picked = picked * weights.unsqueeze(2)
    return picked.sum(dim=1).to(rows.dtype)


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
