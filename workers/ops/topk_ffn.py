"""A mixture of experts whole: `router_logits`, `route`, `choice_weights` and `routed_ffn` as one.

To the bit what these give one after the other. Of many small experts an op more takes as long as
several of them: after their products nothing of torch and Python is left in the cache. So this is
for plain calls on a CPU; whoever traces, compiles or watches them, and whatever the kernels do not
serve, has the parts.

Shape suffixes: T tokens, K choices, R rows in expert order, D width, H hidden width, E experts.
"""
# ruff: noqa: N803 (shape suffixes are capital letters)

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from workers.ops import _ops, product
from workers.ops.choice_weights import choice_weights
from workers.ops.grouped_ffn import ACTIVATIONS
from workers.ops.native import native, on_cuda
from workers.ops.operation import differentiated, plain
from workers.ops.route import Routing, route
from workers.ops.routed_ffn import is_last, routed_ffn, routed_gradients
from workers.ops.router import router_logits


class _TopkFfn(Function):
    """(out, logits) of what `_forward` takes, and of an empty list into which the routing goes."""

    @staticmethod
    def forward(ctx: Any, routed: list[Tensor], *inputs: Any) -> tuple[Tensor, Tensor]:
        x, router, bias, w1, w2, ctx.k, ctx.activation = inputs
        (out, logits, *routing), kept = _forward(True, *inputs)
        routed += routing
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, router, bias, w1, w2, *routing, *kept)
        return out, logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_logits: Tensor | None) -> Any:
        x, router, bias, w1, w2, chosen, order, inverse, offsets, weights, rows, pre = (
            ctx.saved_tensors
        )
        needs = ctx.needs_input_grad[1:]
        # To be differentiated again, as far as the parts are.
        if torch.is_grad_enabled() or not plain((grad, of_logits)):
            inputs = x, router, bias, w1, w2, ctx.k, ctx.activation
            return None, *_backward_of_parts(inputs, needs, grad, of_logits)
        of_x: Tensor | None = None
        of_w1: Tensor | None = None
        of_w2: Tensor | None = None
        gated = any(needs[:3])
        if grad is not None:
            spare = rows if is_last() else torch.empty_like(rows)
            made = order, inverse, offsets, rows, pre, w1, w2, ctx.activation
            of_x, of_weights, of_w1, of_w2 = routed_gradients(
                spare, grad, x, weights, *made, needs[0], gated, needs[3] or needs[4]
            )
            if gated:
                own = grad.new_empty((x.shape[0], router.shape[0]))
                _ops.weigh_backward(weights, of_weights, chosen, own, torch.get_num_threads())
                of_logits = own if of_logits is None else own.add_(of_logits)
        of_router = of_bias = None
        if gated and of_logits is not None:
            if needs[0] and grad is None:
                of_x = x.new_zeros(x.shape)
            if needs[0]:
                assert of_x is not None
                arrays = native(of_logits), native(router)
                _ops.linear_grad_input(*arrays, of_x, True, threads=torch.get_num_threads())
            if needs[1]:
                of_router = product.grad_weight(of_logits, x)
            of_bias = of_logits.sum(dim=0) if needs[2] else None
        experts = of_w1 if needs[3] else None, of_w2 if needs[4] else None
        return None, of_x if needs[0] else None, of_router, of_bias, *experts, None, None


def _forward(
    keep: bool,
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    k: int,
    activation: str,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What is found: out, logits, chosen, order, inverse, offsets; and weights, rows, pre."""
    threads, tokens, experts = torch.get_num_threads(), x.shape[0], router.shape[0]
    pairs, x = tokens * k, native(x)
    logits, weights = x.new_empty((tokens, experts)), x.new_empty((tokens, k))
    chosen = x.new_empty((tokens, k), dtype=torch.int32)
    order, inverse = (x.new_empty((pairs,), dtype=torch.int64) for _ in range(2))
    offsets = x.new_empty((experts + 1,), dtype=torch.int64)
    out, rows = x.new_empty(x.shape), x.new_empty((pairs, x.shape[1]))
    pre = x.new_empty((pairs, w1.shape[2])) if keep else None
    of_bias = None if bias is None else native(bias)
    _ops.linear_forward(x, native(router), of_bias, logits, threads=threads)
    _ops.route(logits, k, chosen, order, inverse, offsets, threads=threads)
    _ops.weigh(logits, chosen, weights, threads)
    number = ACTIVATIONS.index(activation)
    made = native(w1), native(w2), number, out, rows, pre
    _ops.routed_ffn(x, weights, order, inverse, offsets, *made, threads)
    found = out, logits, chosen, order, inverse, offsets
    return found, () if pre is None else (weights, rows, pre)


def _parts(
    x: Tensor, router: Tensor, bias: Tensor | None, w1: Tensor, w2: Tensor, k: int, activation: str
) -> tuple[Tensor, Tensor, Routing]:
    x = x.view_as(x)  # its two gradients are one before they meet others
    logits = router_logits(x, router)
    if bias is not None:
        logits = logits + bias
    routing = route(logits.detach().float(), k)
    weights = choice_weights(logits, routing.chosen)
    return routed_ffn(x, routing, weights, w1, w2, activation), logits, routing


def _backward_of_parts(
    inputs: tuple[Any, ...],
    needs: tuple[bool, ...],
    grad: Tensor | None,
    of_logits: Tensor | None,
) -> tuple[Tensor | None, ...]:
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        out, logits, _ = _parts(*inputs)
    pairs = [(o, g) for o, g in ((out, grad), (logits, of_logits)) if g is not None]
    if not pairs:
        return (None,) * len(inputs)
    outputs, grads = zip(*pairs, strict=True)
    wanted = [i for i, needed in enumerate(needs) if needed]
    of = [inputs[i] for i in wanted]
    made = torch.autograd.grad(outputs, of, grads, create_graph=again, allow_unused=True)
    by_input = dict(zip(wanted, made, strict=True))
    return tuple(by_input.get(i) for i in range(len(inputs)))


def topk_ffn(
    x_TD: Tensor,
    router_ED: Tensor,
    k: int,
    w1: Tensor,
    w2: Tensor,
    activation: str = "gelu",
    bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor, Routing]:
    """The k experts of highest logit of each token, summed by the softmax over their logits.

    Differentiable also by way of the logits; once by way of the output.

    Args:
        x_TD: [T, D].
        router_ED: [E, D], of which the logits are the product with the tokens.
        k: choices of each token, 1 to E.
        w1: [E, D, H]; of swiglu [E, D, 2H], the gate before the value.
        w2: [E, H, D].
        activation: gelu | relu | silu | swiglu.
        bias_E: [E], added to the logits.

    Returns:
        (out [T, D], logits [T, E], routing).

    Raises:
        ValueError: shapes or dtypes that do not fit, or k.
    """
    inputs: tuple[Any, ...] = x_TD, router_ED, bias_E, w1, w2, k, activation
    if not torch.compiler.is_compiling() and plain(inputs) and _served(*inputs):
        if not differentiated(inputs):
            (out, logits, *routed), _ = _forward(False, *inputs)
        else:
            routed = []
            # Past what serves transforms and the other form of `Function`.
            apply = super(Function, _TopkFfn).apply
            out, logits = apply(routed, *inputs)  # type: ignore[no-untyped-call]
        return out, logits, Routing(*routed)
    return _parts(*inputs)


def _served(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    k: int,
    activation: str,
) -> bool:
    """Whether the kernels take these; what does not fit at all is for the parts to refuse."""
    return (
        x.is_cpu
        and not on_cuda(x)
        and router.is_cpu
        and w1.is_cpu
        and w2.is_cpu
        and x.dtype is router.dtype is w1.dtype is w2.dtype is torch.float32
        and (bias is None or (bias.is_cpu and bias.dtype is torch.float32))
        and x.dim() == router.dim() == 2
        and w1.dim() == w2.dim() == 3
        and router.shape == (w1.shape[0], x.shape[1])
        and 1 <= k <= router.shape[0]
        and activation in ACTIVATIONS
        and not torch.is_autocast_enabled("cpu")
        and not os.environ.get("HETERPS_GROUPED_FFN")
    )
