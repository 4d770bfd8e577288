"""How ops are registered with torch.

`torch.library.custom_op` looks at each call whether an output is an input, and goes through several
layers of Python: more than half of what a call of a small op costs. Ours give new tensors, so those
that change nothing are registered without it. Those that write into their arguments keep it: it
tells autograd of what they have changed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from workers.uncompiled import uncompiled


class Operation:
    """An op of torch's whose outputs are new tensors.

    Args:
        name: `space::name`.
        function: what computes it on every device, without autograd.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        space, _, short = name.partition("::")
        self._name = name
        self._library = torch.library.Library(space, "FRAGMENT")
        schema = torch.library.infer_schema(function, mutates_args=())
        self._library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag,))
        self._library.impl(short, function, "CompositeExplicitAutograd")
        self.overload: Any = getattr(getattr(torch.ops, space), short).default

    def __call__(self, *arguments: Any) -> Any:
        """Compute it, and note it for autograd."""
        return self.overload(*arguments)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same on tensors without data; gives the function back."""
        torch.library.register_fake(self._name, function, lib=self._library)
        return function

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., Any]
    ) -> None:
        """How it differentiates, as `torch.library.register_autograd` has it."""
        torch.library.register_autograd(
            self._name, backward, setup_context=setup_context, lib=self._library
        )


def operation(name: str) -> Callable[[Callable[..., Any]], Operation]:
    """Make a function an op of torch's that changes none of its arguments."""
    return lambda function: Operation(name, function)


def changing(name: str, changes: Iterable[str]) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a function an op of torch's that writes into some of its arguments."""

    def made(function: Callable[..., Any]) -> CustomOpDef:
        operation = torch.library.custom_op(name, function, mutates_args=changes)
        kernels: dict[Any, Callable[..., Any]] = getattr(operation, "_backend_fns", {})
        kernels.update({device: uncompiled(kernel) for device, kernel in kernels.items()})
        return operation

    return made
