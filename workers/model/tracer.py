"""What `torch.fx` leaves out of a forward that it traces: tensors made of the sizes of others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

_MAKERS = ("arange", "eye", "full", "linspace", "ones", "zeros")


class Tracer(fx.Tracer):
    """Traces calls such as `torch.zeros(x.shape[0], 8)`, too."""

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> fx.Graph:
        """The graph of a forward."""
        with _makers_traced():
            return super().trace(root, concrete_args)


@contextmanager
def _makers_traced() -> Iterator[None]:
    makers = {name: getattr(torch, name) for name in _MAKERS}
    try:
        for name, make in makers.items():
            setattr(torch, name, _traced(make))
        yield
    finally:
        for name, make in makers.items():
            setattr(torch, name, make)


def _traced(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, fx.Proxy)]
        if not given:
            return make(*args, **kwargs)
        return given[0].tracer.create_proxy("call_function", make, args, kwargs)

    return made
