"""torch without its compiler, which takes nearly as long to import as torch itself.

Some of torch's functions are wrapped in what tells the compiler to leave them alone: a first call
imports it. Where torch does not have that, or has it otherwise, all is as torch has it.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """A function of torch's without that wrapper."""
    return cast(F, getattr(function, "__wrapped__", function))
