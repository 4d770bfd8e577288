"""What `torch.fx` leaves out of a forward that it traces.

Tensors made of the sizes of others; and the backward of a `torch.autograd.Function`, whose forward
it would follow instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

_CONSTANT = "_tensor_constant"  # what torch.fx calls them
_MAKERS = ("arange", "eye", "full", "linspace", "ones", "tensor", "zeros")


class Tracer(fx.Tracer):
    """Traces calls such as `torch.zeros(x.shape[0], 8)` and `Function.apply(x)`, too."""

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> fx.Graph:
        """The graph of a forward."""
        with _makers_traced():
            graph = super().trace(root, concrete_args)
        for node in graph.nodes:  # the root has them for as long as it is traced
            if node.op == "get_attr" and str(node.target).startswith(_CONSTANT):
                node.op, node.target = "call_function", constant(getattr(root, str(node.target)))
        return graph


def constant(value: Tensor) -> Callable[[], Tensor]:
    """What makes a tensor that a forward has made of numbers alone: a new one each time."""
    kept = value.detach().clone()

    def constant() -> Tensor:
        return kept.clone()

    constant.written = (kept.dtype, kept.tolist())  # type: ignore[attr-defined]
    return constant


@contextmanager
def _makers_traced() -> Iterator[None]:
    makers = {name: getattr(torch, name) for name in _MAKERS}
    own = torch.autograd.Function.__dict__["apply"]
    try:
        for name, make in makers.items():
            setattr(torch, name, _traced(make))
        torch.autograd.Function.apply = classmethod(_applied(own))  # type: ignore[method-assign, assignment]
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
        for name, make in makers.items():
            setattr(torch, name, make)


def _traced(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        given = _proxies(args, kwargs)
        if not given:
            return make(*args, **kwargs)
        return given[0].tracer.create_proxy("call_function", make, args, kwargs)

    return made


def _applied(own: Any) -> Callable[..., Any]:
    """What stands for a `Function.apply`; torch's own, such as checkpoints, call modules inside."""

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        given = _proxies(args, kwargs)
        if not given or function.__module__.startswith("torch."):
            return own.__func__(function, *args, **kwargs)
        tracer = given[0].tracer
        return tracer.create_proxy("call_function", _apply_of(function), args, kwargs)

    return apply


@cache
def _apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What applies a function, under its name: the target of a node has one."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return function.apply(*args, **kwargs)

    apply.__name__ = apply.__qualname__ = function.__name__
    return apply


def _proxies(args: Any, kwargs: Any) -> list[fx.Proxy]:
    return [one for one in tree_leaves((args, kwargs)) if isinstance(one, fx.Proxy)]
