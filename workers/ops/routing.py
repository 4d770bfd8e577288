"""Torch ops of the mixture of experts: `heterps::route`, `gather_rows`, `gather_sum`, `gather_dot`.

A pair is (token, choice), its flat index `token * k + choice`. `route` groups the pairs by expert;
`gather_rows` copies tokens into that order and `gather_sum` brings them back, weighted. Each of the
three gathers is the derivative of the other two, so all of them differentiate to any order. Sums
run in a fixed order without atomics: equal inputs give equal bits on every run.

Shapes: T tokens, E experts, K choices, D width, R rows in expert order (T*K unless pairs were
dropped; a dropped pair has a negative `inverse` and counts as zero).

Where each runs: CPU and CUDA float16, bfloat16, float32 and float64 in native code (sums of the
16-bit types in float32). Anything else (CUDA tensors where `_ops` was built without CUDA) takes the
equivalent made of torch's own operators; `native_for` says which. To build the kernels, install
where nvcc and an NVIDIA GPU are present, or with the CMake option HETERPS_CUDA=ON.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import native, native_for, stream


def _weights_dtype(rows: Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


# --- route ---------------------------------------------------------------------------------------


@torch.library.custom_op("heterps::route", mutates_args=())
def _route(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"route: logits: expected float32 [tokens, experts], got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    tokens, experts = logits.shape
    if not 1 <= k <= experts:
        raise ValueError(f"route: k: expected 1 to {experts} (the number of experts), got {k}")
    if not native_for(logits):
        return _route_torch(logits, k)
    chosen, order, inverse, offsets = _route_empty(logits, k)
    if logits.is_cuda:
        size = _ops.route_workspace(tokens * k, experts)
        workspace = torch.empty(size, dtype=torch.int64, device=logits.device)
        with torch.cuda.device(logits.device):
            _ops.route(
                native(logits), k, chosen, order, inverse, offsets, workspace, stream(logits)
            )
    else:
        _ops.route(native(logits), k, chosen, order, inverse, offsets)
    return chosen, order, inverse, offsets


@_route.register_fake
def _route_empty(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    pairs = tokens * k
    return (
        logits.new_empty((tokens, k), dtype=torch.int32),
        logits.new_empty((pairs,), dtype=torch.int64),
        logits.new_empty((pairs,), dtype=torch.int64),
        logits.new_empty((experts + 1,), dtype=torch.int64),
    )


def _route_torch(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    infinity = float("inf")
    # Adding zero turns -0.0 into 0.0, so that the two tie.
    keys = logits.detach().nan_to_num(nan=-infinity, posinf=infinity, neginf=-infinity) + 0.0
    chosen = keys.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    return chosen.int(), *_group_torch(chosen, logits.shape[1])


def _group_torch(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, inverse, offsets) of the choices [T, K]."""
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    bounds = torch.arange(experts + 1, device=order.device)
    return order, inverse, torch.searchsorted(flat[order], bounds)


# --- gather_rows ---------------------------------------------------------------------------------


@torch.library.custom_op("heterps::gather_rows", mutates_args=())
def _gather_rows(
    x: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int
) -> Tensor:
    if not native_for(x):
        rows = x[order // k]
        if weights is None:
            return rows
        return (rows * weights.reshape(-1)[order].unsqueeze(1)).to(x.dtype)
    rows = x.new_empty((len(order), x.shape[1]))
    with torch.cuda.device_of(x):
        _ops.gather_rows(
            native(x),
            _native_weights(weights, x),
            native(order),
            k,
            rows,
            stream(x),
            torch.get_num_threads(),
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


@torch.library.custom_op("heterps::gather_sum", mutates_args=())
def _gather_sum(
    rows: Tensor, weights: Tensor | None, inverse: Tensor, order: Tensor, k: int
) -> Tensor:
    tokens = len(inverse) // k
    if not native_for(rows):
        picked = _picked(rows, inverse, k).to(_weights_dtype(rows))
        if weights is not None:
            picked = picked * weights.unsqueeze(2)
        return picked.sum(dim=1).to(rows.dtype)
    x = rows.new_empty((tokens, rows.shape[1]))
    with torch.cuda.device_of(rows):
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


@torch.library.custom_op("heterps::gather_dot", mutates_args=())
def _gather_dot(x: Tensor, rows: Tensor, inverse: Tensor, order: Tensor, k: int) -> Tensor:
    dtype = _weights_dtype(rows)
    if not native_for(rows):
        picked = _picked(rows, inverse, k)
        return (x.unsqueeze(1).to(dtype) * picked.to(dtype)).sum(dim=2)
    weights = rows.new_empty((len(inverse) // k, k), dtype=dtype)
    with torch.cuda.device_of(rows):
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
    if len(rows) == 0:
        rows = rows.new_zeros((1, rows.shape[1]))
    return torch.where(kept, rows[inverse.clamp(min=0)], 0).reshape(-1, k, rows.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.k = inputs[4]


_gather_rows.register_autograd(_gather_rows_backward, setup_context=_save)
_gather_sum.register_autograd(_gather_sum_backward, setup_context=_save)
_gather_dot.register_autograd(_gather_dot_backward, setup_context=_save)


# --- what callers use ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routing:
    """Which expert each pair goes to, and the pairs grouped by expert.

    chosen: int32 [T, K]; of `route`, best first, and equal logits go to the lower expert.
    order: int64 [R], flat pair of each row; ascending inside an expert.
    inverse: int64 [T*K], row of each pair; negative where it was dropped.
    offsets: int64 [E+1]; expert e owns rows offsets[e] to offsets[e+1].
    """

    chosen: Tensor
    order: Tensor
    inverse: Tensor
    offsets: Tensor

    @property
    def k(self) -> int:
        """Choices of each token."""
        return self.chosen.shape[1]

    @property
    def counts(self) -> Tensor:
        """Rows of each expert, int64 [E]."""
        return self.offsets.diff()

    def limited(self, capacity: int, first_choices_first: bool = False) -> "Routing":
        """The same with at most `capacity` rows for each expert: its later tokens are dropped.

        Args:
            capacity: rows that an expert keeps.
            first_choices_first: an expert drops what is a token's second choice before any first
                one, and so on.
        """
        experts = torch.repeat_interleave(self.counts, output_size=len(self.order))
        position = torch.arange(len(self.order), device=self.order.device)
        if first_choices_first:
            ranked = (experts * self.k + self.order % self.k).argsort(stable=True)
            position = torch.empty_like(ranked).scatter(0, ranked, position)
        return self._kept(position - self.offsets[experts] < capacity)

    def only(self, pairs: Tensor) -> "Routing":
        """The same without the pairs that are false in `pairs`, bool [T, K]."""
        return self._kept(pairs.flatten()[self.order])

    def _kept(self, rows: Tensor) -> "Routing":
        """The same with the rows that are true in `rows`, bool [R]."""
        order = self.order[rows]
        inverse = torch.full_like(self.inverse, -1)
        inverse[order] = torch.arange(len(order), device=order.device)
        before = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
        return Routing(self.chosen, order, inverse, before[self.offsets])


def route(logits: Tensor, k: int) -> Routing:
    """Chooses the k experts of highest logit for each token (NaN counts as -inf).

    logits: float32 [T, E]. Raises ValueError for another dtype or shape, or k outside 1..E.
    """
    return Routing(*_route(logits, k))


def group(chosen: Tensor, experts: int) -> Routing:
    """The routing of choices int32 [T, K] made elsewhere, each from 0 to experts - 1."""
    return Routing(chosen, *_group_torch(chosen, experts))


def gather_rows(x: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Copies tokens into expert order: x [T, D] -> [R, D], times weights [T, K] if given."""
    rows: Tensor = _gather_rows(x, weights, routing.inverse, routing.order, routing.k)
    return rows


def gather_sum(rows: Tensor, routing: Routing, weights: Tensor | None = None) -> Tensor:
    """Sums each token's rows: rows [R, D] -> [T, D], weighted by weights [T, K] if given."""
    x: Tensor = _gather_sum(rows, weights, routing.inverse, routing.order, routing.k)
    return x
