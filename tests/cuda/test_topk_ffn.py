"""topk_ffn against a loop in float64, and to the bit against its parts."""

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers import ops
from workers.ops.grouped_ffn import ACTIVATIONS, activate

# The package has a function of the same name.
module = importlib.import_module("workers.ops.topk_ffn")

Found = tuple[Tensor, Tensor, ops.Routing]
Inputs = tuple[Tensor, Tensor, int, Tensor, Tensor, str, Tensor | None]


def case(
    tokens: int,
    experts: int,
    k: int,
    dim: int = 24,
    hidden: int = 20,
    activation: str = "swiglu",
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    generator = torch.Generator().manual_seed(tokens + dim)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.to(dtype).requires_grad_()

    inner = 2 * hidden if activation == "swiglu" else hidden
    return (
        random(tokens, dim),
        random(experts, dim),
        k,
        random(experts, dim, inner, scale=dim**-0.5),
        random(experts, hidden, dim, scale=hidden**-0.5),
        activation,
        random(experts) if bias else None,
    )


def parts(
    x: Tensor, router: Tensor, k: int, w1: Tensor, w2: Tensor, activation: str, bias: Tensor | None
) -> Found:
    logits = ops.router_logits(x, router)
    if bias is not None:
        logits = logits + bias
    routing = ops.route(logits.detach().float(), k)
    weights = ops.choice_weights(logits, routing.chosen)
    return ops.routed_ffn(x, routing, weights, w1, w2, activation), logits, routing


def loop(inputs: Inputs, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, in float64."""
    x, router, _, w1, w2, activation, bias = inputs
    x, router, w1, w2 = (t.double() for t in (x, router, w1, w2))
    logits = x @ router.t() if bias is None else x @ router.t() + bias.double()
    out = []
    for token, of, experts in zip(x, logits, chosen.long(), strict=True):
        weights = of[experts].softmax(0)
        outputs = [activate(token @ w1[e], activation) @ w2[e] for e in experts]
        out.append(sum(w * o for w, o in zip(weights, outputs, strict=True)))
    return torch.stack(out), logits


def tensors(inputs: Inputs) -> list[Tensor]:
    return [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]


def gradients(inputs: Inputs, out: Tensor, logits: Tensor, used: str) -> list[Tensor]:
    """Of a loss of the output, of the logits, or of both."""
    loss = out.new_zeros(())
    if used != "logits":
        loss = loss + (out * torch.linspace(-1, 1, out.numel()).to(out).view_as(out)).sum()
    if used != "out":
        loss = loss + logits.square().mean()
    if used == "both":
        loss = loss + inputs[0].pow(3).sum()  # as beside a residual
    return list(torch.autograd.grad(loss, tensors(inputs), materialize_grads=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("used", ["out", "logits", "both"])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(1, 1, 1), (7, 3, 2), (16, 8, 2), (90, 16, 3), (700, 24, 4)]
)
def test_what_its_parts_give_to_the_bit_and_a_loop_in_float64(
    tokens: int, experts: int, k: int, used: str, activation: str
) -> None:
    inputs = case(tokens, experts, k, activation=activation, bias=tokens % 2 == 0)
    out, logits, routing = ops.topk_ffn(*inputs)
    same_out, same_logits, same = parts(*inputs)
    assert torch.equal(out, same_out)
    assert torch.equal(logits, same_logits)
    for name in ("chosen", "order", "inverse", "offsets"):
        assert torch.equal(getattr(routing, name), getattr(same, name))
    exact_out, exact_logits = loop(inputs, routing.chosen)
    torch.testing.assert_close(out.double(), exact_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits.double(), exact_logits, rtol=1e-4, atol=1e-5)
    exact = gradients(inputs, exact_out, exact_logits, used)
    separate = gradients(inputs, same_out, same_logits, used)
    for mine, other, one in zip(gradients(inputs, out, logits, used), separate, exact, strict=True):
        scale = one.abs().max().clamp(min=1)
        # Parts of the sum over uses may cancel: what rounds is as large as the largest.
        torch.testing.assert_close(mine / scale, other / scale, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(mine / scale, one / scale, rtol=1e-4, atol=1e-5)


def test_gradients_of_the_output_are_those_of_its_parts_to_the_bit() -> None:
    inputs = case(300, 12, 3, bias=True)
    mine, same = (gradients(inputs, *f(*inputs)[:2], "out") for f in (ops.topk_ffn, parts))
    assert all(map(torch.equal, mine, same))


@pytest.mark.parametrize("only", range(5))
def test_gradients_of_one_input_alone(only: int) -> None:
    inputs = case(60, 6, 2, bias=True)
    wanted = tensors(inputs)
    every = gradients(inputs, *ops.topk_ffn(*inputs)[:2], "both")
    for i, tensor in enumerate(wanted):
        tensor.requires_grad_(i == only)
    (one,) = gradients(inputs, *ops.topk_ffn(*inputs)[:2], "both")
    assert torch.equal(one, every[only])


def test_a_graph_that_is_kept_gives_the_same_gradients_again() -> None:
    inputs = case(90, 8, 3)
    out = ops.topk_ffn(*inputs)[0]
    found = [
        torch.autograd.grad(out, tensors(inputs), torch.ones_like(out), retain_graph=keep)
        for keep in (True, True, False)
    ]
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))


def test_without_gradients_and_on_other_threads_the_bits_are_the_same() -> None:
    inputs = case(700, 24, 4)
    out, logits, _ = ops.topk_ffn(*inputs)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                found = ops.topk_ffn(*inputs)
            assert not found[0].requires_grad
            assert torch.equal(found[0], out)
            assert torch.equal(found[1], logits)
            every = [gradients(inputs, *ops.topk_ffn(*inputs)[:2], "both") for _ in range(2)]
            assert all(map(torch.equal, *every))
    finally:
        torch.set_num_threads(before)


def test_the_output_is_differentiable_once_and_the_logits_again() -> None:
    """A second derivative is refused, not taken for zero."""
    inputs = case(9, 4, 2, bias=True)
    x, router = inputs[:2]
    for used in ("out", "both"):
        out, logits, _ = ops.topk_ffn(*inputs)
        loss = out.sum() if used == "out" else out.sum() + logits.square().sum()
        grads = torch.autograd.grad(loss, tensors(inputs), create_graph=True)
        assert all(
            map(torch.equal, grads, torch.autograd.grad(loss, tensors(inputs), retain_graph=True))
        )
        with pytest.raises(RuntimeError, match="routed_ffn_backward"):
            torch.autograd.grad(grads[0].square().sum(), x)
    found = []
    for function in (ops.topk_ffn, parts):
        logits = function(*inputs)[1]
        first = torch.autograd.grad(logits.pow(3).sum(), (x, router), create_graph=True)
        total = first[0].square().sum() + first[1].square().sum()
        found.append(torch.autograd.grad(total, (x, router)))
    exact = (x.detach().double().requires_grad_(), router.detach().double().requires_grad_())
    bias = inputs[6]
    assert bias is not None
    logits = exact[0] @ exact[1].t() + bias.detach().double()
    first = torch.autograd.grad(logits.pow(3).sum(), exact, create_graph=True)
    total = first[0].square().sum() + first[1].square().sum()
    for mine, same, one in zip(*found, torch.autograd.grad(total, exact), strict=True):
        assert torch.equal(mine, same)
        torch.testing.assert_close(mine.double(), one, rtol=1e-4, atol=1e-3)


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Tensor], types: object, args: tuple[object, ...], kwargs: object
    ) -> Tensor:
        self.seen.add(str(func))
        return func(*args)


def test_who_watches_or_compiles_has_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case(30, 5, 2)
    plainly = ops.topk_ffn(*inputs)
    with torch.no_grad(), _Calls() as calls:
        watched = ops.topk_ffn(*inputs)
    assert {"heterps.route.default", "heterps.routed_ffn.default"} <= calls.seen
    assert torch.equal(watched[0], plainly[0])
    compiled = torch.compile(ops.topk_ffn, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs)[0], plainly[0])
    monkeypatch.setenv("HETERPS_GROUPED_FFN", "loop")
    torch.testing.assert_close(ops.topk_ffn(*inputs)[0], plainly[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_have_the_parts(dtype: torch.dtype) -> None:
    inputs = case(30, 5, 2, dtype=dtype)
    for mine, same in zip(ops.topk_ffn(*inputs)[:2], parts(*inputs)[:2], strict=True):
        assert torch.equal(mine, same)


def test_what_does_not_fit_is_refused() -> None:
    x, router, k, w1, w2, activation, _ = case(9, 4, 2)
    with pytest.raises(ValueError, match=r"k: expected 1 to 4"):
        ops.topk_ffn(x, router, 5, w1, w2, activation)
    with pytest.raises(ValueError, match=r"activation: expected one of gelu, .*got tanh"):
        ops.topk_ffn(x, router, k, w1, w2, "tanh")
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        ops.topk_ffn(x, router[:, 1:], k, w1, w2, activation)
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        ops.topk_ffn(x, router[1:], k, w1, w2, activation)
