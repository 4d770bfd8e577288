"""torch without its compiler, which takes nearly as long to import as torch itself.

Some of torch's functions are wrapped in what tells the compiler to leave them alone: a first call
imports it. Where torch does not have that, or has it otherwise, all is as torch has it.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch._library.custom_ops import CustomOpDef

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """A function of torch's without that wrapper."""
    return cast(F, getattr(function, "__wrapped__", function))


def operation(
    name: str, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make a function an operation of torch's, as `torch.library.custom_op` does."""

    def made(function: Callable[..., Any]) -> CustomOpDef:
        operation = torch.library.custom_op(name, function, mutates_args=mutates_args)
        kernels: dict[Any, Callable[..., Any]] = getattr(operation, "_backend_fns", {})
        kernels.update({device: uncompiled(kernel) for device, kernel in kernels.items()})
        return operation

    return made
