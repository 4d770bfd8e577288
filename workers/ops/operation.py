"""Operations of torch's, which plain calls reach without its dispatcher.

`torch.library.custom_op` takes some 30 us a call, and three times that where it differentiates:
longer than many small experts. A compiler, a tracer, a transform, a mode or a profiler needs the
operation; a plain call has its kernel and its derivative from here.
"""

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, profiler

from workers.uncompiled import uncompiled

_TENSORS = (Tensor, nn.Parameter)  # subclasses see calls for themselves
_OTHERS = (int, float, bool, str, NoneType)


class Operation:
    """A kernel and its derivative as an operation, and as a function of autograd.

    op: the operation, as `torch.library.custom_op` makes it.
    """

    def __init__(self, name: str, kernel: Callable[..., Any], mutates_args: Iterable[str]) -> None:
        self.op = torch.library.custom_op(name, kernel, mutates_args=mutates_args)
        kernels: dict[Any, Callable[..., Any]] = getattr(self.op, "_backend_fns", {})
        kernels.update({device: uncompiled(made) for device, made in kernels.items()})
        # Of what is written in place the dispatcher tells autograd.
        self._kernel = None if mutates_args else kernel
        self._name = name
        self._function: type[Function] | None = None

    def __call__(self, *inputs: Any) -> Any:
        """What the kernel gives."""
        if self._kernel is not None and not torch.compiler.is_compiling() and plain(inputs):
            if not differentiated(inputs):
                return self._kernel(*inputs)
            if self._function is not None:
                # Past what serves transforms and the other form of `Function`.
                return super(Function, self._function).apply(*inputs)  # type: ignore[misc]
        return self.op(*inputs)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """As `torch.library.register_fake`."""
        self.op.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """As `torch.library.register_autograd`; `ctx` has `plain` if the call was a plain one."""
        self.op.register_autograd(backward, setup_context=setup_context)
        kernel = self._kernel
        if kernel is None:
            return

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = kernel(*inputs)
            ctx.plain = True
            setup_context(ctx, inputs, output)
            return output

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(self._name, (Function,), members)


def operation(
    name: str, mutates_args: Iterable[str] = ()
) -> Callable[[Callable[..., Any]], Operation]:
    """Make a function an operation, as `torch.library.custom_op` does."""
    return lambda kernel: Operation(name, kernel, mutates_args)


def differentiated(inputs: tuple[Any, ...]) -> bool:
    """Whether autograd has to know of a call with these."""
    return torch.is_grad_enabled() and any(type(x) in _TENSORS and x.requires_grad for x in inputs)


def plain(inputs: tuple[Any, ...]) -> bool:
    """Whether nothing but autograd has to know of a call with these."""
    for x in inputs:
        if type(x) in _TENSORS:
            if not (x.is_cpu or x.is_cuda):
                return False
        elif type(x) not in _OTHERS:
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or profiler._is_profiler_enabled
    )
