"""`heterps::choice_weights`: how much a token's experts count, by a softmax over their logits.

By torch's operators it is a gather, a softmax over a few numbers and, backwards, a scatter: of many
small experts they take longer than a tenth of their products. On a CPU it is one kernel.

Shapes: T tokens, E experts, K choices.
"""

from typing import Any

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import native
from workers.ops.operation import operation


def choice_weights_plainly(logits: Tensor, chosen: Tensor) -> Tensor:
    """What `heterps::choice_weights` gives, by torch's operators."""
    return logits.gather(1, chosen.long()).softmax(dim=1)


@operation("heterps::choice_weights")
def _choice_weights(logits: Tensor, chosen: Tensor) -> Tensor:
    weights = logits.new_empty(chosen.shape)
    _ops.weigh(native(logits), native(chosen), weights, torch.get_num_threads())
    return weights


@_choice_weights.register_fake
def _(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.new_empty(chosen.shape)


@operation("heterps::choice_weights_backward")
def _choice_weights_backward(weights: Tensor, grad: Tensor, chosen: Tensor, experts: int) -> Tensor:
    gradient = grad.new_empty((grad.shape[0], experts))
    _ops.weigh_backward(
        native(weights), native(grad), native(chosen), gradient, torch.get_num_threads()
    )
    return gradient


@_choice_weights_backward.register_fake
def _(weights: Tensor, grad: Tensor, chosen: Tensor, experts: int) -> Tensor:
    return grad.new_empty((grad.shape[0], experts))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    logits, chosen = inputs
    ctx.save_for_backward(output, chosen)
    ctx.experts = logits.shape[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    weights, chosen = ctx.saved_tensors
    if not torch.is_grad_enabled():
        gradient: Tensor = _choice_weights_backward(weights, grad, chosen, ctx.experts)
        return gradient, None
    own = weights * (grad - (weights * grad).sum(dim=1, keepdim=True))  # differentiates again
    return own.new_zeros((len(own), ctx.experts)).scatter(1, chosen.long(), own), None


_choice_weights.register_autograd(_backward, setup_context=_save)


def choice_weights(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:  # noqa: N803 (shape suffixes)
    """The softmax over the logits of each token's choices, [T, K] of the logits' type.

    Args:
        logits_TE: [T, E].
        chosen_TK: int32 [T, K], of `route`: no expert twice in a token.

    Raises:
        IndexError: an expert that there is not; on a CUDA device the caller answers for them.
    """
    if logits_TE.device.type == "cpu" and logits_TE.dtype == torch.float32:
        weights: Tensor = _choice_weights(logits_TE, chosen_TK)
        return weights
    return choice_weights_plainly(logits_TE, chosen_TK)
