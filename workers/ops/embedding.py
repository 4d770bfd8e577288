"""`heterps::embedding_pool`: sums or means of embedding rows, and a step on the rows alone.

The backward sorts the ids and sums each id's gradients in the order of the ids, so no gradient of
the size of the table exists and equal inputs give equal bits. `embedding_pool` gives autograd a
sparse gradient; `embedding_update` goes further and applies an optimizer to the rows at once, as
FBGEMM's table-batched embeddings do.

Shapes: V rows of the table, D width, N ids, B bags. Sums of 16-bit rows are in float32.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import device_of, native, native_for, stream
from workers.ops.operation import operation

Rule = Literal["sgd", "adagrad", "rowwise_adagrad"]
_RULES = ("sgd", "adagrad", "rowwise_adagrad")  # in the order of the native enumeration


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@operation("heterps::embedding_pool")
def _pool(table: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    if not native_for(table):
        rows = table[ids].to(_sums(table.dtype))
        if scale is not None:
            rows = rows * scale.unsqueeze(1)
        out = rows.new_zeros((offsets.shape[0] - 1, table.shape[1]))
        return out.index_add(0, _bags(ids, offsets), rows).to(table.dtype)
    out = table.new_empty((offsets.shape[0] - 1, table.shape[1]))
    with device_of(table):
        _ops.embedding_pool(
            native(table),
            native(ids),
            native(offsets),
            None if scale is None else native(scale),
            out,
            stream(table),
            torch.get_num_threads(),
        )
    return out


@_pool.register_fake
def _(table: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor | None) -> Tensor:
    return table.new_empty((offsets.shape[0] - 1, table.shape[1]))


@operation("heterps::embedding_segments")
def _segments(
    grad: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor | None, rows: int
) -> tuple[Tensor, Tensor]:
    """(ids sorted [N], their gradients [N, D]: the sum at the first of equal ids, else zero)."""
    ordered, source = ids.sort(stable=True)
    bag = _bags(ids, offsets)
    if not native_for(grad):
        parts = grad[bag[source]].to(_sums(grad.dtype))
        if scale is not None:
            parts = parts * scale[source].unsqueeze(1)
        first = torch.searchsorted(ordered, ordered)
        return ordered, torch.zeros_like(parts).index_add(0, first, parts).to(grad.dtype)
    out = grad.new_empty((ids.shape[0], grad.shape[1]))
    with device_of(grad):
        _ops.embedding_segments(
            native(grad),
            ordered,
            source,
            bag,
            None if scale is None else native(scale),
            rows,
            out,
            stream(grad),
            torch.get_num_threads(),
        )
    return ordered, out


@_segments.register_fake
def _(
    grad: Tensor, ids: Tensor, offsets: Tensor, scale: Tensor | None, rows: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), grad.new_empty((ids.shape[0], grad.shape[1]))


@operation("heterps::embedding_update", mutates_args=("table", "state"))
def _update(
    table: Tensor,
    state: Tensor | None,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    rule: str,
    rate: float,
    epsilon: float,
) -> None:
    if not native_for(table):
        _update_torch(table, state, grad, ids, offsets, scale, rule, rate, epsilon)
        return
    if not table.is_contiguous() or (state is not None and not state.is_contiguous()):
        raise ValueError("embedding_update: table and state: expected contiguous tensors")
    ordered, source = ids.sort(stable=True)
    with device_of(table):
        _ops.embedding_update(
            native(grad),
            ordered,
            source,
            _bags(ids, offsets),
            None if scale is None else native(scale),
            _RULES.index(rule),
            rate,
            epsilon,
            table.detach(),
            None if state is None else state.detach(),
            stream(table),
            torch.get_num_threads(),
        )


@_update.register_fake
def _(
    table: Tensor,
    state: Tensor | None,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    rule: str,
    rate: float,
    epsilon: float,
) -> None:
    return None


def _update_torch(
    table: Tensor,
    state: Tensor | None,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    rule: str,
    rate: float,
    epsilon: float,
) -> None:
    sums = _sums(table.dtype)
    rows = grad[_bags(ids, offsets)].to(sums)
    if scale is not None:
        rows = rows * scale.unsqueeze(1)
    distinct, inverse = ids.unique(return_inverse=True)
    rows = rows.new_zeros((len(distinct), table.shape[1])).index_add(0, inverse, rows)
    step = rows
    if state is not None:
        squares = rows.square()
        if rule == "rowwise_adagrad":
            squares = squares.sum(dim=1) / max(table.shape[1], 1)
        state[distinct] += squares
        divisor = state[distinct].sqrt() + epsilon
        step = rows / (divisor.unsqueeze(1) if rule == "rowwise_adagrad" else divisor)
    table[distinct] = (table[distinct].to(sums) - rate * step).to(table.dtype)


def _bags(ids: Tensor, offsets: Tensor) -> Tensor:
    """The bag of each id [N], without waiting for a device."""
    positions = torch.arange(ids.shape[0], device=ids.device)
    return torch.searchsorted(offsets, positions, right=True) - 1


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    table, ids, offsets, scale = inputs
    # The rows themselves only where the weights are to learn.
    learns = scale is not None and ctx.needs_input_grad[3]
    ctx.save_for_backward(table if learns else None, ids, offsets, scale)
    ctx.shape, ctx.learns = table.shape, learns


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    table, ids, offsets, scale = ctx.saved_tensors
    grad_table = grad_scale = None
    if ctx.needs_input_grad[0]:
        ordered, rows = _segments(grad, ids, offsets, scale, ctx.shape[0])
        grad_table = torch.sparse_coo_tensor(
            ordered.unsqueeze(0), rows, ctx.shape, check_invariants=False
        )
    if ctx.learns:
        dtype = _sums(grad.dtype)
        rows = grad[_bags(ids, offsets)].to(dtype)
        grad_scale = (rows * table[ids].to(dtype)).sum(dim=1).to(scale.dtype)
    return grad_table, None, None, grad_scale


_pool.register_autograd(_backward, setup_context=_save)


def embedding_pool(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    mode: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """For each bag the sum or mean of its rows; zeros of an empty bag.

    Its gradient by `table` is a sparse tensor, not coalesced: ids ascend, and of equal ones the
    first has the sum and the others zero.

    Args:
        table: [V, D].
        ids: int64 [N], from 0 to V - 1. A CPU checks them; on a CUDA device the caller does.
        offsets: int64 [B + 1]; bag b has the ids offsets[b] to offsets[b + 1].
        weights: [N], of each row; a mean divides by the number of ids, whatever they weigh.
        mode: sum | mean.

    Returns:
        [B, D].

    Raises:
        ValueError: shapes, dtypes or a mode that do not fit.
        IndexError: ids or offsets out of range.
    """
    _check(table, ids, offsets, weights, mode)
    scale = _scale(table, ids, offsets, weights, mode)
    out: Tensor = _pool(table, ids, offsets, scale)
    return out


def embedding_update(
    table: Tensor,
    state: Tensor | None,
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    mode: Literal["sum", "mean"] = "sum",
    *,
    rule: Rule = "sgd",
    rate: float,
    epsilon: float = 1e-8,
) -> None:
    """Backward of `embedding_pool` and a step of the optimizer in one, in place.

    Args:
        table: [V, D], contiguous; changed where `ids` point.
        state: None of sgd; of adagrad the sums of squares [V, D], of rowwise_adagrad the sums of
            mean squares [V]; in float32, or float64 with a table of it.
        grad: [B, D], of the pooled rows.
        ids: as given to `embedding_pool`.
        offsets: as given to it.
        weights: as given to it.
        mode: as given to it.
        rule: sgd | adagrad | rowwise_adagrad; w -= rate * g / (sqrt(state) + epsilon).
        rate: the learning rate.
        epsilon: of both Adagrads.

    Raises:
        ValueError: shapes, dtypes, a mode or a rule that do not fit.
        IndexError: ids out of range.
    """
    _check(table, ids, offsets, weights, mode)
    if rule not in _RULES:
        raise ValueError(f"embedding_update: rule: expected one of {', '.join(_RULES)}, got {rule}")
    expected = {"sgd": None, "adagrad": table.shape, "rowwise_adagrad": table.shape[:1]}[rule]
    if (state is None) != (expected is None) or (
        state is not None and (state.shape != expected or state.dtype != _sums(table.dtype))
    ):
        got = "none" if state is None else f"{state.dtype} {list(state.shape)}"
        wanted = "none" if expected is None else f"{_sums(table.dtype)} {list(expected)}"
        raise ValueError(f"embedding_update: state: expected {wanted}, got {got}")
    scale = _scale(table, ids, offsets, weights, mode)
    with torch.no_grad():
        grad = grad.to(table.dtype)
        _update(table, state, grad, ids, offsets, scale, rule, float(rate), float(epsilon))


def _scale(
    table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: str
) -> Tensor | None:
    """What each row is multiplied by [N], or None for 1."""
    dtype = _sums(table.dtype)
    scale = None if weights is None else weights.to(dtype)
    if mode == "mean":
        share = 1 / offsets.diff().clamp(min=1).to(dtype)
        shares = share[_bags(ids, offsets)]
        scale = shares if scale is None else scale * shares
    return scale


def _check(table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: str) -> None:
    if mode not in ("sum", "mean"):
        raise ValueError(f"embedding_pool: mode: expected sum or mean, got {mode}")
    if table.dim() != 2:
        raise ValueError(f"embedding_pool: table: expected [V, D], got {list(table.shape)}")
    for name, tensor in (("ids", ids), ("offsets", offsets)):
        if tensor.dim() != 1 or tensor.dtype != torch.int64:
            raise ValueError(
                f"embedding_pool: {name}: expected int64 of one dimension, got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    if len(offsets) == 0:
        raise ValueError("embedding_pool: offsets: expected at least one")
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(
            f"embedding_pool: weights: expected {list(ids.shape)}, got {list(weights.shape)}"
        )
