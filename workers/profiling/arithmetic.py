"""Floating-point operations of a forward, as torch counts them, and of what it does not count.

torch's counter knows its own products, attention and convolutions; what it has no formula for
counts as nothing, so that a layer of it would cost a GPU hardly more than its launches.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from workers.ops.linear import ONEDNN, available
from workers.uncompiled import uncompiled

_Shape = Sequence[int]


def forward_flops(module: nn.Module, inputs: list[Any]) -> float:
    """Of one forward of these inputs, a product and a sum counting as two."""
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    counter.mod_tracker = _Whole()
    with torch.no_grad(), counter:
        mode: Any = type(getattr(counter, "mode", counter))
        mode.__torch_dispatch__ = uncompiled(mode.__torch_dispatch__)
        module(*inputs)
    return float(counter.get_total_flops())


class _Whole(ModuleTracker):
    """Follows no module: hooks for that would break a forward that differentiates."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _formulas() -> dict[Any, Callable[..., int]]:
    """By operation; of tensors they are given the shapes."""
    ours, aten = torch.ops.heterps, torch.ops.aten
    found: dict[Any, Callable[..., int]] = {
        ours.linear: _linear,
        ours.router_logits: _linear,
        ours.grouped_ffn: _grouped_ffn,
        ours.routed_ffn: _routed_ffn,
        aten.mkldnn_rnn_layer: _rnn_layer,
        aten._cudnn_rnn: _cudnn_rnn,
        aten._trilinear: _trilinear,
        aten.mv: _mv,
        aten.addmv: lambda bias, *others, **named: _mv(*others, **named),
    }
    if ONEDNN in available():
        found[torch.ops.mkldnn._linear_pointwise] = _linear
    return found


def _linear(rows: _Shape, weight: _Shape, *_: object, **__: object) -> int:
    """Rows [N, in], weight [out, in]."""
    return 2 * rows[0] * math.prod(weight)


def _grouped_ffn(
    rows: _Shape, offsets: _Shape, w1: _Shape, w2: _Shape, *_: object, **__: object
) -> int:
    """Rows [R, D], each of one of the experts w1 [E, D, inner], w2 [E, H, D]."""
    return 2 * rows[0] * (math.prod(w1[1:]) + math.prod(w2[1:]))


def _routed_ffn(
    x: _Shape,
    weights: _Shape,
    order: _Shape,
    inverse: _Shape,
    offsets: _Shape,
    w1: _Shape,
    w2: _Shape,
    *_: object,
    **__: object,
) -> int:
    """Tokens x [T, D], pairs of a token and an expert [R], experts as of grouped_ffn."""
    return _grouped_ffn(order, offsets, w1, w2)


def _rnn_layer(x: _Shape, of_inputs: _Shape, of_hidden: _Shape, *_: object, **__: object) -> int:
    """One direction of x [length, batch, in]; weights [gates H, in] and [gates H, H]."""
    return 2 * math.prod(x[:2]) * (math.prod(of_inputs) + math.prod(of_hidden))


def _cudnn_rnn(x: _Shape, weights: Sequence[_Shape], *_: object, **__: object) -> int:
    """All layers and directions of x [length, batch, in]; biases are vectors.

    Of sequences that are packed x is [steps of all, in].
    """
    return 2 * math.prod(x[:-1]) * sum(math.prod(one) for one in weights if len(one) == 2)


def _trilinear(
    left: _Shape,
    weight: _Shape,
    right: _Shape,
    left_at: Sequence[int],
    weight_at: Sequence[int],
    right_at: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    """Each has size 1 at the places that are added to it; all are multiplied with each other."""
    rank = len(left) + len(left_at)
    sizes = [1] * rank
    for shape, added in ((left, left_at), (weight, weight_at), (right, right_at)):
        own = iter(shape)
        for place in range(rank):
            if place not in added:
                sizes[place] = max(sizes[place], next(own))
    return 2 * math.prod(sizes)


def _mv(matrix: _Shape, *_: object, **__: object) -> int:
    return 2 * math.prod(matrix)
