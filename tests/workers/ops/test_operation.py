"""A plain call gives what the operation does, and whoever has to see the operation sees it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from workers.ops.operation import Operation, operation

calls: list[str] = []


def _scaled(x: Tensor, factor: float, unused: Tensor | None) -> Tensor:
    calls.append("kernel")
    return x.detach() * factor


def _made(name: str, differentiates: bool) -> Operation:
    made = operation(f"heterps_test::{name}")(_scaled)
    made.register_fake(lambda x, factor, unused: torch.empty_like(x))
    if differentiates:

        def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.factor = inputs[1]

        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
            return made(grad, ctx.factor, None), None, None

        made.register_autograd(backward, setup_context=save)
    return made


_ONCE = {
    "scaled": _made("scaled", differentiates=True),
    "constant": _made("constant", differentiates=False),
}


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """Twice a tensor; that the operation is called is noted."""
    made, op = _ONCE["scaled"], _ONCE["scaled"].op

    def noted(*inputs: Any) -> Any:
        calls.append("operation")
        return op(*inputs)

    monkeypatch.setattr(made, "op", noted)
    calls.clear()
    return lambda x: made(x, 2.0, None)


def test_a_plain_call_is_without_the_operation(scaled: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, requires_grad=True)
    out = scaled(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with torch.no_grad():
        assert torch.equal(scaled(x), out)
    assert torch.equal(out, 2 * x)
    assert torch.equal(grad, torch.full((3,), 2.0))
    assert "operation" not in calls
    (second,) = torch.autograd.grad(scaled(x * x).sum(), x)
    assert torch.equal(second, 4 * x)


def test_what_has_no_derivative_is_not_taken_for_a_constant() -> None:
    x = torch.randn(3, requires_grad=True)
    out = _ONCE["constant"](x, 2.0, None)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        out.sum().backward()


def test_a_mode_sees_it(scaled: Callable[[Tensor], Tensor]) -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        scaled(torch.randn(3))
    assert "heterps_test.scaled.default" in seen


def test_a_profiler_sees_it(scaled: Callable[[Tensor], Tensor]) -> None:
    with torch.profiler.profile() as profile:
        scaled(torch.randn(3))
    assert "heterps_test::scaled" in {event.key for event in profile.key_averages()}


def test_tracers_see_it(scaled: Callable[[Tensor], Tensor]) -> None:
    module = make_fx(scaled)(torch.randn(3))
    assert "heterps_test.scaled" in module.code
    calls.clear()
    graph = fx.symbolic_trace(scaled).graph
    assert "operation" in calls
    assert any("scaled" in str(node.target) for node in graph.nodes)


def test_a_subclass_sees_it(scaled: Callable[[Tensor], Tensor]) -> None:
    class Sub(Tensor):
        pass

    assert type(scaled(torch.randn(3).as_subclass(Sub))) is Sub
    assert "operation" in calls


def test_a_tensor_without_numbers_has_the_fake(scaled: Callable[[Tensor], Tensor]) -> None:
    out = scaled(torch.empty(3, device="meta"))
    assert out.device.type == "meta"
    assert "kernel" not in calls


def test_a_transform_is_refused_as_by_the_operation(scaled: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: scaled(x).sum())(torch.randn(3))
    assert "operation" in calls
