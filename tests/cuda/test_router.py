"""A router's logits and their gradients beside the same in float64."""

import pytest
import torch
from torch import Tensor

from tests.cuda.guarded import Guarded
from workers import ops
from workers.ops import _ops
from workers.ops.router import _router_backward, _router_logits


def case(tokens: int, dim: int, experts: int, device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, dim, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(experts, dim, generator=generator).to(device) * dim**-0.5
    grad = torch.randn(tokens, experts, generator=generator).to(device)
    return x, weight, grad


def distance(mine: Tensor, exact: Tensor) -> float:
    return float(
        (mine.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp(min=1e-30)
    )


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
    torch.testing.assert_close(logits, x.to(wide) @ weight.to(wide).t())
    of_x, of_weight = torch.autograd.grad(logits, (x, weight), grad.to(wide))
    assert of_x.dtype == dtype
    assert of_weight.dtype == torch.float32


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("tokens", "dim", "experts"),
    [(0, 8, 4), (1, 1, 1), (15, 300, 70), (16, 300, 70), (257, 96, 64), (1000, 33, 5)],
)
def test_float32_on_a_cpu_is_as_good_as_float32(
    tokens: int, dim: int, experts: int, threads: int
) -> None:
    x, weight, grad = case(tokens, dim, experts)
    x, weight = (x.float() + 0.001).requires_grad_(), weight.requires_grad_()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = ops.router_logits(x, weight)
        found = logits, *torch.autograd.grad(logits, (x, weight), grad)
        torch.set_num_threads(1)
        logits = ops.router_logits(x, weight)
        assert torch.equal(logits, found[0])
        same = torch.autograd.grad(logits, (x, weight), grad)
        assert all(map(torch.equal, same, found[1:]))
    finally:
        torch.set_num_threads(before)
    wide, of, by = x.double(), weight.double(), grad.double()
    for mine, exact in zip(found, (wide @ of.t(), by @ of, by.t() @ wide), strict=True):
        assert distance(mine, exact) < 1e-6


def test_logits_of_a_token_do_not_depend_on_those_beside_it() -> None:
    x, weight, _ = case(400, 96, 20)
    x = x.float()
    logits = ops.router_logits(x, weight)
    for begin, end in ((0, 16), (7, 40), (200, 400)):
        assert torch.equal(ops.router_logits(x[begin:end], weight), logits[begin:end])


def test_kernels_write_their_outputs_alone() -> None:
    x, weight, grad = case(20, 33, 7)
    x = x.float()
    guarded = Guarded()
    logits, of_x, of_weight = (guarded.output(*shape) for shape in ((20, 7), (20, 33), (7, 33)))
    _ops.linear_forward(x, weight, None, logits)
    _ops.linear_grad_input(grad, weight, of_x)
    _ops.linear_grad_weight(grad, x, of_weight)
    guarded.check(all_written=True)
    torch.testing.assert_close(of_x, grad @ weight)
    _ops.linear_grad_input(grad, weight, of_x.fill_(1), True)
    guarded.check(all_written=True)
    torch.testing.assert_close(of_x, 1 + grad @ weight)
    for wrong in (weight[:, 1:].contiguous(), weight.double()):
        with pytest.raises(ValueError, match="weight: expected"):
            _ops.linear_forward(x, wrong, None, logits)
    with pytest.raises(ValueError, match="bias: expected"):
        _ops.linear_forward(x, weight, grad[0, 1:].contiguous(), logits)
    with pytest.raises(ValueError, match="grad_x: expected"):
        _ops.linear_grad_input(grad, weight, of_x[1:])
    with pytest.raises(ValueError, match="grad: expected"):
        _ops.linear_grad_weight(grad[1:], x, of_weight)


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
