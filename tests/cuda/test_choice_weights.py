"""Weights of choices against a gather and a softmax in float64."""

import pytest
import torch
from torch import Tensor

from workers import ops
from workers.ops.choice_weights import _choice_weights, _choice_weights_backward

SHAPES = [(0, 3, 1), (1, 1, 1), (5, 4, 4), (100, 8, 2), (1000, 64, 8)]


def problem(tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, choices and a direction."""
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator) * 3
    direction = torch.randn(tokens, k, generator=generator)
    return logits, ops.route(logits, k).chosen, direction


def exact(logits: Tensor, chosen: Tensor) -> Tensor:
    return logits.double().gather(1, chosen.long()).softmax(dim=1)


@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_and_gradient(tokens: int, experts: int, k: int, dtype: torch.dtype) -> None:
    logits, chosen, direction = problem(tokens, experts, k)
    logits = logits.to(dtype).requires_grad_()
    mine, right = ops.choice_weights(logits, chosen), exact(logits, chosen)
    assert mine.dtype == dtype
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(mine.double(), right, rtol=0, atol=tolerance)
    (grad,) = torch.autograd.grad(mine, logits, direction.to(dtype))
    (exact_grad,) = torch.autograd.grad(right, logits, direction.double())
    torch.testing.assert_close(grad.double(), exact_grad.double(), rtol=0, atol=4 * tolerance)


def test_strides_and_threads() -> None:
    logits, chosen, direction = problem(3000, 32, 4)
    apart = torch.stack([logits, -logits], dim=2)[..., 0].requires_grad_()
    before, given = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            weights = ops.choice_weights(apart, chosen)
            given.append((weights, *torch.autograd.grad(weights, apart, direction.t().clone().t())))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*given, strict=True))
    torch.testing.assert_close(given[0][0].double(), exact(logits, chosen), rtol=0, atol=1e-6)


def test_what_is_no_number() -> None:
    """As softmax has it: a token of which a chosen logit is NaN, or all are -inf, has NaN."""
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[nan, 1.0, 2.0], [-inf, -inf, -inf], [-inf, 0.0, -inf], [88.0, -88, 0]])
    chosen = torch.tensor([[2, 0], [0, 1], [1, 0], [0, 1]], dtype=torch.int32)
    mine, right = ops.choice_weights(logits, chosen), exact(logits, chosen)
    torch.testing.assert_close(mine.double(), right, equal_nan=True)


def test_it_differentiates_twice() -> None:
    logits, chosen, direction = problem(5, 4, 2)
    seconds = []
    for function in (ops.choice_weights, exact):
        x = logits.clone().requires_grad_()
        (grad,) = torch.autograd.grad(
            function(x, chosen), x, direction.to(function(x, chosen).dtype), create_graph=True
        )
        seconds.append(torch.autograd.grad(grad.square().sum(), x)[0])
    torch.testing.assert_close(seconds[0], seconds[1])
    assert seconds[1].abs().max() > 1e-3


@pytest.mark.parametrize("expert", [-1, 3])
def test_an_expert_that_there_is_not(expert: int) -> None:
    chosen = torch.tensor([[expert]], dtype=torch.int32)
    with pytest.raises(IndexError, match="expected 0 to 2"):
        ops.choice_weights(torch.zeros(1, 3), chosen)
    with pytest.raises(IndexError, match="expected 0 to 2"):
        _choice_weights_backward(torch.ones(1, 1), torch.ones(1, 1), chosen, 3)


def test_opcheck() -> None:
    logits, chosen, direction = problem(5, 4, 2)
    torch.library.opcheck(_choice_weights.op, (logits.requires_grad_(), chosen))
    weights = ops.choice_weights(logits, chosen).detach()
    torch.library.opcheck(_choice_weights_backward.op, (weights, direction, chosen, 4))
