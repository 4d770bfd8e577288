"""Torch ops `heterps::gather_rows`, `gather_sum` and `gather_dot`: tokens to experts and back.

`gather_rows` copies tokens into the order of their experts (`route`) and `gather_sum` brings them
back, weighted. Each of the three is the derivative of the other two, so all of them differentiate
to any order. Sums run in a fixed order without atomics: equal inputs give equal bits on every run.

Shapes: T tokens, K choices, D width, R rows in expert order; a dropped pair counts as zero.
"""

from typing import Any

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import device_of, native, native_for, stream
from workers.ops.operation import operation
from workers.ops.route import Routing


def _weights_dtype(rows: Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


# --- by torch's operators ------------------------------------------------------------------------


def gather_rows_plainly(
    x: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int
) -> Tensor:
    """What `heterps::gather_rows` gives."""
    rows = x[order // k]
    if weights is None:
        return rows
    return (rows * weights.reshape(-1)[order].unsqueeze(1)).to(x.dtype)


def gather_sum_plainly(
    rows: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int
) -> Tensor:
    """What `heterps::gather_sum` gives."""
    picked = _picked(rows, inverse, k).to(_weights_dtype(rows))
    if weights is not None:
        picked = picked * weights.unsqueeze(2)
    return picked.sum(dim=1).to(rows.dtype)


# --- gather_rows ---------------------------------------------------------------------------------


@operation("heterps::gather_rows")
def _gather_rows(
    x: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int
) -> Tensor:
    if not native_for(x):
        return gather_rows_plainly(x, weights, inverse, order, k)
    rows = x.new_empty((order.shape[0], x.shape[1]))
    with device_of(x):
        _ops.gather_rows(
            native(x),
            _native_weights(weights, x),
            native(order),
            k,
            rows,
            stream(x),
            torch.get_num_threads(),
            native(inverse),
        )
    return rows


@_gather_rows.register_fake
def _(x: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int) -> Tensor:
    return x.new_empty((order.shape[0], x.shape[1]))


def _gather_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, inverse, order = ctx.saved_tensors
    grad_x = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_x = _gather_sum(grad, weights, inverse, order, ctx.k)
    if ctx.needs_input_grad[1]:
        grad_weights = _gather_dot(x, grad, inverse, order, ctx.k).to(weights.dtype)
    return grad_x, grad_weights, None, None, None


# --- gather_sum ----------------------------------------------------------------------------------


@operation("heterps::gather_sum")
def _gather_sum(
    rows: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int
) -> Tensor:
    if not native_for(rows):
        return gather_sum_plainly(rows, weights, inverse, order, k)
    x = rows.new_empty((inverse.shape[0] // k, rows.shape[1]))
    with device_of(rows):
        _ops.gather_sum(
            native(rows),
            _native_weights(weights, rows),
            native(inverse),
            k,
            x,
            stream(rows),
            torch.get_num_threads(),
        )
    return x


@_gather_sum.register_fake
def _(rows: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int) -> Tensor:
    return rows.new_empty((inverse.shape[0] // k, rows.shape[1]))


def _gather_sum_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights, inverse, order = ctx.saved_tensors
    grad_rows = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_rows = _gather_rows(grad, weights, inverse, order, ctx.k)
    if ctx.needs_input_grad[1]:
        grad_weights = _gather_dot(grad, rows, inverse, order, ctx.k).to(weights.dtype)
    return grad_rows, grad_weights, None, None, None


# --- gather_dot ----------------------------------------------------------------------------------


@operation("heterps::gather_dot")
def _gather_dot(x: Tensor, rows: Tensor, inverse: Tensor, order: Tensor, k: int) -> Tensor:
    dtype = _weights_dtype(rows)
    if not native_for(rows):
        picked = _picked(rows, inverse, k)
        return (x.unsqueeze(1).to(dtype) * picked.to(dtype)).sum(dim=2)
    weights = rows.new_empty((inverse.shape[0] // k, k), dtype=dtype)
    with device_of(rows):
        _ops.gather_dot(
            native(x),
            native(rows),
            native(inverse),
            k,
            weights,
            stream(rows),
            torch.get_num_threads(),
        )
    return weights


@_gather_dot.register_fake
def _(x: Tensor, rows: Tensor, inverse: Tensor, order: Tensor, k: int) -> Tensor:
    return rows.new_empty((inverse.shape[0] // k, k), dtype=_weights_dtype(rows))


def _gather_dot_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, rows, inverse, order = ctx.saved_tensors
    grad_x = grad_rows = None
    if ctx.needs_input_grad[0]:
        grad_x = _gather_sum(rows, grad, inverse, order, ctx.k)
    if ctx.needs_input_grad[1]:
        grad_rows = _gather_rows(x, grad, inverse, order, ctx.k)
    return grad_x, grad_rows, None, None, None


# --- shared --------------------------------------------------------------------------------------


def _native_weights(weights: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if weights is None else native(weights.to(_weights_dtype(rows)))


def _picked(rows: Tensor, inverse: Tensor, k: int) -> Tensor:
    """The row of each pair [T, K, D], zero where it was dropped."""
    kept = (inverse >= 0).unsqueeze(1)
    if rows.shape[0] == 0:
        rows = rows.new_zeros((1, rows.shape[1]))
    return torch.where(kept, rows[inverse.clamp(min=0)], 0).reshape(-1, k, rows.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.k = inputs[4]


_gather_rows.register_autograd(_gather_rows_backward, setup_context=_save)
_gather_sum.register_autograd(_gather_sum_backward, setup_context=_save)
_gather_dot.register_autograd(_gather_dot_backward, setup_context=_save)


# --- what callers use ----------------------------------------------------------------------------


def gather_rows(x: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Copies tokens into expert order: x [T, D] -> [R, D], times weights [T, K] if given."""
    rows: Tensor = _gather_rows(x, weights, routing.inverse, routing.order, routing.k)
    return rows


def gather_sum(rows: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Sums each token's rows: rows [R, D] -> [T, D], weighted by weights [T, K] if given."""
    x: Tensor = _gather_sum(rows, weights, routing.inverse, routing.order, routing.k)
    return x
