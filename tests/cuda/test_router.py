"""A router's logits and their gradients beside the same in float64."""

import pytest
import torch
from torch import Tensor

from workers import ops
from workers.ops.router import _router_backward, _router_logits


def case(tokens: int, dim: int, experts: int, device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, dim, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(experts, dim, generator=generator).to(device) * dim**-0.5
    grad = torch.randn(tokens, experts, generator=generator).to(device)
    return x, weight, grad


def distance(mine: Tensor, exact: Tensor) -> float:
    return float((mine.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def check(x: Tensor, weight: Tensor, grad: Tensor) -> None:
    logits = _router_logits(x, weight)
    of_x, of_weight = _router_backward(grad, x, weight)
    assert logits.dtype == of_weight.dtype == torch.float32
    assert of_x.dtype == x.dtype
    limit = 5e-6 if x.is_cuda else 1e-6  # tensor cores cut off bits where they align what they sum
    assert distance(logits, x.double() @ weight.double().t()) < limit
    assert distance(of_weight, grad.double().t() @ x.double()) < limit
    # No further off than the nearest bfloat16 are.
    exact = grad.double() @ weight.double()
    assert distance(of_x, exact) < 1.01 * distance(exact.bfloat16(), exact) + 1e-5


@pytest.mark.parametrize(("tokens", "dim", "experts"), [(1, 1, 1), (33, 48, 7), (512, 256, 64)])
def test_three_parts_are_as_good_as_float32(tokens: int, dim: int, experts: int) -> None:
    check(*case(tokens, dim, experts))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or a torch without CUDA")
@pytest.mark.parametrize(("tokens", "dim", "experts"), [(33, 48, 7), (4096, 2048, 128)])
def test_three_parts_on_cuda(tokens: int, dim: int, experts: int) -> None:
    check(*case(tokens, dim, experts, "cuda"))


def test_parts_that_are_left_out_are_seen() -> None:
    x, weight, _ = case(64, 128, 8)
    rounded = x.double() @ weight.bfloat16().double().t()
    assert distance(rounded, x.double() @ weight.double().t()) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_logits_are_wide_whatever_the_tokens(dtype: torch.dtype) -> None:
    x, weight, grad = case(20, 16, 4)
    x, weight = x.to(dtype).requires_grad_(), weight.requires_grad_()
    logits = ops.router_logits(x, weight)
    wide = torch.promote_types(dtype, torch.float32)
    assert logits.dtype == wide
    assert torch.equal(logits, x.to(wide) @ weight.to(wide).t())
    of_x, of_weight = torch.autograd.grad(logits, (x, weight), grad.to(wide))
    assert of_x.dtype == dtype
    assert of_weight.dtype == torch.float32


def test_no_tokens() -> None:
    x, weight, grad = case(0, 8, 4)
    assert _router_logits(x, weight).shape == (0, 4)
    of_x, of_weight = _router_backward(grad, x, weight)
    assert of_x.shape == x.shape
    assert torch.equal(of_weight, torch.zeros(4, 8))


def test_opcheck() -> None:
    x, weight, grad = case(5, 8, 3)
    torch.library.opcheck(_router_logits.op, (x.requires_grad_(), weight.requires_grad_()))
    torch.library.opcheck(_router_backward.op, (grad, x.detach(), weight.detach()))
