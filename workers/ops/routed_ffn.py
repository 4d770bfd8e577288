"""`heterps::routed_ffn`: tokens through the experts that they are routed to, and back, as one op.

What `gather_rows`, `grouped_ffn` and `gather_sum` give one after the other, to the bit: on a CPU
rows are gathered as they are computed, and what the steps of an expert give each other stays in
the cache. Where there is no such kernel the three are called.

Shape suffixes: T tokens, K choices, R rows in expert order, D width, H hidden width, E experts.
"""
# ruff: noqa: N803, N806 (shape suffixes are capital letters)

from typing import Any

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.gather import gather_rows, gather_sum
from workers.ops.grouped_ffn import ACTIVATIONS, backend_for, grouped_ffn
from workers.ops.native import native, native_for, on_cuda
from workers.ops.operation import differentiated, operation, plain
from workers.ops.route import Routing

_Four = tuple[Tensor, Tensor, Tensor, Tensor]


@operation("heterps::routed_ffn")
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
    """(out [T, D], rows [R, D], pre [R, inner]), the latter two for the backward, if to be kept."""
    rows = x.new_empty((order.shape[0], x.shape[1]))
    pre = x.new_empty((order.shape[0], w1.shape[2]) if keep else (0,))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _ops.routed_ffn(
        native(x),
        native(weights),
        native(order),
        native(inverse),
        native(offsets),
        native(w1),
        native(w2),
        ACTIVATIONS.index(activation),
        out,
        rows,
        pre if keep else None,
        torch.get_num_threads(),
    )
    return out, rows if keep else x.new_empty(0), pre


@_routed_ffn.register_fake
def _(
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
    rows = (order.shape[0], x.shape[1]) if keep else (0,)
    pre = (order.shape[0], w1.shape[2]) if keep else (0,)
    return x.new_empty(x.shape), x.new_empty(rows), x.new_empty(pre)


@operation("heterps::routed_ffn_backward")
def _routed_ffn_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    rows: Tensor,
    pre: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str,
    of_x: bool,
    of_weights: bool,
    of_experts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spare = torch.empty_like(rows) if of_x else rows
    rest = order, inverse, offsets, rows, pre, w1, w2, activation, of_x, of_weights, of_experts
    return routed_gradients(spare, grad, x, weights, *rest)


def routed_gradients(
    spare: Tensor,
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    rows: Tensor,
    pre: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str,
    of_x: bool,
    of_weights: bool,
    of_experts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same; `spare` [R, D] is written, and may be `rows` if these are not needed again."""
    gradients: _Four = _empty(x, weights, w1, w2, of_x, of_weights, of_experts)
    _ops.routed_ffn_backward(
        native(grad),
        native(x),
        native(weights),
        native(order),
        native(inverse),
        native(offsets),
        native(rows),
        native(pre),
        native(w1),
        native(w2),
        ACTIVATIONS.index(activation),
        spare if of_x else None,
        gradients[0] if of_x else None,
        gradients[1] if of_weights else None,
        gradients[2] if of_experts else None,
        gradients[3] if of_experts else None,
        torch.get_num_threads(),
    )
    return gradients


@_routed_ffn_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    rows: Tensor,
    pre: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str,
    of_x: bool,
    of_weights: bool,
    of_experts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(x, weights, w1, w2, of_x, of_weights, of_experts)


def _empty(
    x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, of_x: bool, of_weights: bool, of_w: bool
) -> _Four:
    return (
        x.new_empty(x.shape if of_x else (0,)),
        weights.new_empty(weights.shape if of_weights else (0,)),
        w1.new_empty(w1.shape if of_w else (0,)),
        w2.new_empty(w2.shape if of_w else (0,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, activation, _ = inputs
    _, rows, pre = output
    ctx.mark_non_differentiable(rows, pre)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors[:5], rows, pre, *tensors[5:])
    ctx.activation = activation


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    of_x, of_weights, of_w1, of_w2 = (ctx.needs_input_grad[i] for i in (0, 1, 5, 6))
    saved = ctx.saved_tensors
    inputs = (grad, *saved, ctx.activation, of_x, of_weights, of_w1 or of_w2)
    if hasattr(ctx, "plain") and is_last() and plain(inputs) and not differentiated(inputs):
        grads = routed_gradients(saved[5], *inputs)
    else:
        grads = _routed_ffn_backward(*inputs)
    return (
        grads[0] if of_x else None,
        grads[1] if of_weights else None,
        *(None,) * 3,
        grads[2] if of_w1 else None,
        grads[3] if of_w2 else None,
        *(None,) * 2,
    )


def is_last() -> bool:
    """Whether the backward under way is the last of its graph.

    Of a plain call nobody else has the rows that were kept: their memory, which is in the cache,
    then serves for the gradients of rows.
    """
    return not torch._C._autograd._get_current_graph_task_keep_graph()


_routed_ffn.register_autograd(_backward, setup_context=_save)


def _as_one(x: Tensor, w1: Tensor, w2: Tensor) -> bool:
    """Whether one kernel serves these tensors."""
    if x.device.type != "cpu" or on_cuda(x) or not native_for(x):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    fits = x.dim() == 2 and w1.dim() == w2.dim() == 3 and x.dtype == w1.dtype == w2.dtype
    fits = fits and w1.device == w2.device == x.device and len(w1) == len(w2) > 0
    return fits and backend_for(x, w1, w2) == "native"


def routed_ffn(
    x_TD: Tensor,
    routing: Routing,
    weights_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str = "gelu",
) -> Tensor:
    """The sum of a token's experts by weight; see `grouped_ffn`. Differentiable once.

    Args:
        x_TD: [T, D].
        routing: of these tokens; a dropped pair adds nothing.
        weights_TK: [T, K], of each choice.
        w1: [E, D, H]; of swiglu [E, D, 2H], the gate before the value.
        w2: [E, H, D].
        activation: gelu | relu | silu | swiglu.

    Returns:
        [T, D].

    Raises:
        ValueError: shapes or dtypes that do not fit.
        IndexError: a routing that does not fit.
    """
    if not _as_one(x_TD, w1, w2) or activation not in ACTIVATIONS:
        rows_RD = gather_rows(x_TD, routing)
        rows_RD = grouped_ffn(rows_RD, routing.offsets, w1, w2, activation)
        return gather_sum(rows_RD, routing, weights_TK)
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x_TD, weights_TK, w1, w2))
    routed = routing.order, routing.inverse, routing.offsets
    out: Tensor = _routed_ffn(x_TD, weights_TK.to(dtype), *routed, w1, w2, activation, keep)[0]
    return out
