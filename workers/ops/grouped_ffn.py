"""`heterps::grouped_ffn`: a feed-forward network of two layers for each group of rows.

Shape suffixes: R rows in group order, D width, H hidden width, E groups.

Three ways to the same result; `HETERPS_GROUPED_FFN` names one, else `backend_for` chooses:
    native: the kernels of `cuda/`. CPU: own blocked products, in parallel over blocks of rows.
        CUDA: tensor cores for float16 and bfloat16, plain arithmetic for float32 and float64.
    grouped_mm: torch's grouped matrix product, for bfloat16 on CUDA devices from Hopper on where
        `_ops` has no products for them. Its products are CUTLASS's, as ours on Hopper are, but the
        activation between them takes several of torch's operators.
    loop: a torch product for each group; on a CUDA device this waits for the offsets.
"""
# ruff: noqa: N803, N806 (shape suffixes are capital letters)

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import device_of, native, native_for, on_cuda, stream
from workers.ops.operation import operation

ACTIVATIONS = ("gelu", "relu", "silu", "swiglu")  # in the order of the native enumeration
BACKENDS = ("native", "grouped_mm", "loop")
_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": lambda pre: F.silu(pre.chunk(2, dim=-1)[0]) * pre.chunk(2, dim=-1)[1],
}


def activate(pre: Tensor, activation: str) -> Tensor:
    """The activation by torch's operators: [..., H], of swiglu [..., 2H] -> [..., H]."""
    return _TORCH[activation](pre)


@dataclass(frozen=True, slots=True)
class FfnAt:
    """Where in memory of its own an expert has its matrices: bytes behind its begin.

    w1, w2: of the matrices [D, H], of swiglu [D, 2H], and [H, D].
    hidden: H.
    activation: one of ACTIVATIONS.
    """

    w1: int
    w2: int
    hidden: int
    activation: str


def backend_for(rows: Tensor, w1: Tensor, w2: Tensor) -> str:
    """Which of BACKENDS serves these tensors."""
    wanted = os.environ.get("HETERPS_GROUPED_FFN", "")
    if wanted:
        if wanted not in BACKENDS:
            raise ValueError(
                f"HETERPS_GROUPED_FFN={wanted}: expected one of {', '.join(BACKENDS)}, or unset"
            )
        if wanted == "native" and not native_for(rows):
            raise ValueError(
                f"HETERPS_GROUPED_FFN=native: no kernels here for {rows.dtype} on {rows.device}: "
                "expected loop, or unset"
            )
        return wanted
    if rows.is_cuda and rows.dtype == torch.bfloat16 and _grouped_mm() is not None:
        aligned = all(size % 8 == 0 for size in (*w1.shape[1:], *w2.shape[1:]))
        capability = torch.cuda.get_device_capability(rows.device)
        own = capability == (9, 0) and _ops.products_sm90
        if aligned and capability >= (9, 0) and not own:
            return "grouped_mm"
    return "native" if native_for(rows) else "loop"


def _grouped_mm() -> Callable[..., Tensor] | None:
    # Public from torch 2.10 on.
    return getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@operation("heterps::grouped_ffn")
def _grouped_ffn(
    rows: Tensor, offsets: Tensor, w1: Tensor, w2: Tensor, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    _check(rows, offsets, w1, w2, activation)
    backend = backend_for(rows, w1, w2)
    if backend != "native":
        pre = _products(rows, w1, offsets, backend)
        out = _products(activate(pre, activation), w2, offsets, backend)
        return out, pre if keep else pre.new_empty(0)
    out, pre = _grouped_ffn_empty(rows, offsets, w1, w2, activation, keep)
    act = rows.new_empty((rows.shape[0], w2.shape[1])) if on_cuda(rows) else None
    if on_cuda(rows) and not keep:
        pre = rows.new_empty((rows.shape[0], w1.shape[2]))
    with device_of(rows):
        _ops.grouped_ffn(
            native(rows),
            native(offsets),
            native(w1),
            native(w2),
            ACTIVATIONS.index(activation),
            out,
            pre if keep or on_cuda(rows) else None,
            act,
            stream(rows),
            torch.get_num_threads(),
            _workspace(rows, w1, w2, activation),
        )
    return out, pre if keep else rows.new_empty(0)


def _workspace(rows: Tensor, w1: Tensor, w2: Tensor, activation: str) -> Tensor | None:
    """What the kernels of Hopper need besides, on a GPU that has them."""
    if not on_cuda(rows):
        return None
    kinds = native(rows), native(w1), native(w2), ACTIVATIONS.index(activation)
    size = _ops.grouped_ffn_workspace(*kinds)
    return rows.new_empty(size, dtype=torch.uint8) if size else None


@_grouped_ffn.register_fake
def _grouped_ffn_empty(
    rows: Tensor, offsets: Tensor, w1: Tensor, w2: Tensor, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    pre = (rows.shape[0], w1.shape[2]) if keep else (0,)
    return rows.new_empty(rows.shape), rows.new_empty(pre)


@operation("heterps::grouped_ffn_backward")
def _grouped_ffn_backward(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    pre: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str,
    of_rows: bool,
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    backend = backend_for(rows, w1, w2)
    if backend != "native":
        return _backward_torch(
            grad, rows, offsets, pre, w1, w2, activation, of_rows, of_weights, backend
        )
    gradients: tuple[Tensor, Tensor, Tensor] = _backward_empty(
        grad, rows, offsets, pre, w1, w2, activation, of_rows, of_weights
    )
    with device_of(rows):
        _ops.grouped_ffn_backward(
            native(grad),
            native(rows),
            native(offsets),
            native(pre),
            native(w1),
            native(w2),
            ACTIVATIONS.index(activation),
            rows.new_empty((rows.shape[0], w2.shape[1])) if on_cuda(rows) else None,
            torch.empty_like(pre) if on_cuda(rows) else None,
            gradients[0] if of_rows else None,
            gradients[1] if of_weights else None,
            gradients[2] if of_weights else None,
            stream(rows),
            torch.get_num_threads(),
            _workspace(rows, w1, w2, activation),
        )
    return gradients


@_grouped_ffn_backward.register_fake
def _backward_empty(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    pre: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str,
    of_rows: bool,
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rows.new_empty(rows.shape if of_rows else (0,)),
        rows.new_empty(w1.shape if of_weights else (0,)),
        rows.new_empty(w2.shape if of_weights else (0,)),
    )


def _backward_torch(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    pre: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: str,
    of_rows: bool,
    of_weights: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.contiguous()
    grad_act = _products(grad, w2.transpose(1, 2), offsets, backend)
    grad_pre = _activate_backward(grad_act, pre, activation)
    nothing = rows.new_empty(0)
    grad_rows = _products(grad_pre, w1.transpose(1, 2), offsets, backend) if of_rows else nothing
    if not of_weights:
        return grad_rows, nothing, nothing.clone()
    return (
        grad_rows,
        _outer(rows, grad_pre, offsets, backend),
        _outer(activate(pre, activation), grad, offsets, backend),
    )


def _activate_backward(grad: Tensor, pre: Tensor, activation: str) -> Tensor:
    """The gradient of `pre`; by hand, since autograd is off inside an op."""
    aten = torch.ops.aten
    if activation == "relu":
        return grad * (pre > 0)
    if activation != "swiglu":
        backward = aten.gelu_backward if activation == "gelu" else aten.silu_backward
        result: Tensor = backward(grad, pre)
        return result
    gate, value = (half.contiguous() for half in pre.chunk(2, dim=-1))
    return torch.cat([aten.silu_backward(grad * value, gate), grad * F.silu(gate)], dim=-1)


def grouped_ffn_at(
    rows_RD: Tensor, offsets: Tensor, places: Tensor, memory: Tensor, at: FfnAt, out_RD: Tensor
) -> None:
    """`grouped_ffn` on a CPU of groups whose matrices lie in fixed places; for inference.

    Bits are those of `grouped_ffn`.

    Args:
        rows_RD: [R, D], grouped.
        offsets: int64 [E + 1], as of `grouped_ffn`.
        places: int64 [E], of each group's matrices; negative where its rows are not to be computed.
        memory: uint8 [places, bytes].
        at: where in a place the matrices lie.
        out_RD: [R, D], of which rows of groups with places are written.

    Raises:
        ValueError: shapes, types or places that do not fit.
        IndexError: offsets that do not ascend from 0 to R.
    """
    _ops.grouped_ffn_at(
        native(rows_RD),
        offsets,
        places,
        memory,
        at.w1,
        at.w2,
        at.hidden,
        ACTIVATIONS.index(at.activation),
        out_RD,
        torch.get_num_threads(),
    )


def _products(rows: Tensor, weights: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """Rows [R, M] times the matrix of their group [E, M, N] -> [R, N]."""
    product = _grouped_mm()
    if backend == "grouped_mm" and product is not None:
        return product(rows, weights, offs=offsets[1:].int())
    parts = rows.split(offsets.diff().tolist())
    products = [part @ weight for part, weight in zip(parts, weights, strict=True)]
    return torch.cat(products)


def _outer(left: Tensor, right: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """For each group the left rows [R, M] transposed times the right rows [R, N] -> [E, M, N]."""
    product = _grouped_mm()
    if backend == "grouped_mm" and product is not None:
        return product(left.t(), right, offs=offsets[1:].int())
    counts = offsets.diff().tolist()
    pairs = zip(left.split(counts), right.split(counts), strict=True)
    return torch.stack([part.t() @ other for part, other in pairs])


def _check(rows: Tensor, offsets: Tensor, w1: Tensor, w2: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"grouped_ffn: activation: expected one of {', '.join(ACTIVATIONS)}, got {activation}"
        )
    if rows.dim() != 2 or w1.dim() != 3 or w2.dim() != 3 or offsets.dim() != 1:
        raise ValueError("grouped_ffn: expected rows [R, D], offsets [E + 1], w1 and w2 [E, ., .]")
    (groups, hidden, dim), double = w2.shape, activation == "swiglu"
    for name, tensor, shape in (
        ("rows", rows, (rows.shape[0], dim)),
        ("offsets", offsets, (groups + 1,)),
        ("w1", w1, (groups, dim, 2 * hidden if double else hidden)),
    ):
        if tensor.shape != shape:
            raise ValueError(
                f"grouped_ffn: {name}: expected {list(shape)}, got {list(tensor.shape)}"
            )
    if groups == 0:
        raise ValueError("grouped_ffn: w1: expected at least one group")
    if not rows.dtype == w1.dtype == w2.dtype or offsets.dtype != torch.int64:
        raise ValueError(
            "grouped_ffn: expected rows, w1 and w2 of one dtype and offsets of int64, got "
            f"{rows.dtype}, {w1.dtype}, {w2.dtype} and {offsets.dtype}"
        )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, offsets, w1, w2, activation, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(rows, offsets, output[1], w1, w2)
    ctx.activation = activation


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    rows, offsets, pre, w1, w2 = ctx.saved_tensors
    of_rows, of_w1, of_w2 = (ctx.needs_input_grad[i] for i in (0, 2, 3))
    grad_rows, grad_w1, grad_w2 = _grouped_ffn_backward(
        grad, rows, offsets, pre, w1, w2, ctx.activation, of_rows, of_w1 or of_w2
    )
    return (
        grad_rows if of_rows else None,
        None,
        grad_w1 if of_w1 else None,
        grad_w2 if of_w2 else None,
        None,
        None,
    )


_grouped_ffn.register_autograd(_backward, setup_context=_save)


def grouped_ffn(
    rows_RD: Tensor, offsets: Tensor, w1: Tensor, w2: Tensor, activation: str = "gelu"
) -> Tensor:
    """activate(rows w1[e]) w2[e] for the rows of each group e; differentiable once.

    Keeps rows and what the first layer gives for the backward, and nothing else. Under autocast it
    runs in autocast's dtype, as torch's matrix products do. Sums run in a fixed order.

    Args:
        rows_RD: [R, D], grouped.
        offsets: int64 [E + 1], on the same device; group e owns rows offsets[e] to offsets[e + 1].
            A CPU checks them; on a CUDA device the caller answers for them.
        w1: [E, D, H]; of swiglu [E, D, 2H], the gate before the value.
        w2: [E, H, D].
        activation: gelu | relu | silu | swiglu.

    Returns:
        [R, D].

    Raises:
        ValueError: shapes or dtypes that do not fit.
        IndexError: offsets that do not ascend from 0 to R.
    """
    device = rows_RD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows_RD, w1, w2 = rows_RD.to(dtype), w1.to(dtype), w2.to(dtype)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (rows_RD, w1, w2))
    out: Tensor = _grouped_ffn(rows_RD, offsets, w1, w2, activation, keep)[0]
    return out
