"""`nn.Linear` whose products run where they were measured to be fastest, and the ReLU between two.

In an `nn.Sequential` a ReLU between two such layers is computed with their products, while its
numbers are in the cache: forward with those of the layer before it, backward with the gradient that
the layer behind it gives. The layer before gets the gradient of the ReLU's input then.

Whatever else a layer may meet is torch's own: evaluation, so that a loaded model predicts what was
measured; other dtypes and devices, autocast, `torch.compile`, transforms of `torch.func`,
derivatives in forward mode; and backwards that are to be differentiated in their turn, or of many
gradients at once.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.ops.linear import Products, Routes, forward, grad_input, grad_weight


class _Linear(torch.autograd.Function):
    """Rows [N, in], weight [out, in], bias [out] or None: [N, out].

    With `relu` what a ReLU makes of that; then the gradient that comes back is the one of the
    ReLU's input, as whoever has these as rows, `rectified`, gives it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        relu: bool,
        rectified: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.products, ctx.rectified = products, rectified
        return forward(products.forward, rows, weight, bias, relu)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        products: Products = ctx.products
        of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or _is_batched(grad):  # to be differentiated again, or many
            found = grad @ weight
            if ctx.rectified:
                rows = rows.relu()  # the same, with the gradient of the ReLU's input
                found = torch.ops.aten.threshold_backward(found, rows, 0)
            return found, grad.t() @ rows, grad.sum(0) if of_bias else None, None, None, None
        if not grad.is_contiguous():
            grad = grad.contiguous()
        return (
            grad_input(products.grad_input, grad, weight, rows if ctx.rectified else None)
            if of_rows
            else None,
            grad_weight(products.grad_weight, grad, rows) if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
            None,
            None,
        )


class RoutedLinear(nn.Linear):
    """An `nn.Linear` of a training; a copy or pickle of it is a plain one again."""

    def forward(self, input: Tensor) -> Tensor:
        """Input [..., in]: [..., out]."""
        if _routed(self) and _concerned(self) and _is_plain(input, self):
            chosen = _chosen([self], input)
            if chosen is not None:
                return _chain([self], chosen, input)
        return F.linear(input, self.weight, self.bias)

    def _get_name(self) -> str:
        return nn.Linear.__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name != "routes"}
        return object.__new__, (nn.Linear,), state


class RoutedSequential(nn.Sequential):
    """An `nn.Sequential` of a training; a copy or pickle of it is a plain one again."""

    def forward(self, input: Any) -> Any:
        """What its modules make of it, one after the other."""
        if not _routed(self) or not any(map(_concerned, self)):
            return super().forward(input)  # type: ignore[no-untyped-call]
        modules = list(self)
        while modules:
            linears = _leading(modules)
            chosen = None
            if len(linears) > 1 and _is_plain(input, *linears):
                chosen = _chosen(linears, input)
            if chosen is None:
                input = modules.pop(0)(input)
            else:
                input = _chain(linears, chosen, input)
                del modules[: 2 * len(linears) - 1]
        return input

    def _get_name(self) -> str:
        return nn.Sequential.__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return object.__new__, (nn.Sequential,), self.__dict__


def _routed(module: nn.Module) -> bool:
    """Whether to look at routes at all: it trains, and no compiler follows what is asked here."""
    return module.training and not torch.compiler.is_compiling()


def _concerned(module: nn.Module) -> bool:
    """Whether it may run elsewhere than in torch's BLAS.

    A parametrized weight, which another class has, may change each time it is read.
    """
    return type(module) is RoutedLinear and module.__dict__["routes"].concern(module)


def _leading(modules: Sequence[nn.Module]) -> list[RoutedLinear]:
    """The linear layers with which these begin, a ReLU between each two of them."""
    found: list[RoutedLinear] = []
    for one, relu in zip(modules[::2], [*modules[1::2], None], strict=False):
        if type(one) is not RoutedLinear or not one.training or not _is_itself(one):
            break
        found.append(one)
        if type(relu) is not nn.ReLU or not _is_itself(relu):
            break
    return found


def _is_itself(module: nn.Module) -> bool:
    """Whether to call it is to call its class's forward: nobody looks on or has another."""
    every = nn.modules.module
    return not (
        "forward" in module.__dict__
        or module._compiled_call_impl is not None
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or every._global_forward_hooks
        or every._global_forward_pre_hooks
        or every._global_backward_hooks
        or every._global_backward_pre_hooks
    )


def _chosen(linears: Sequence[RoutedLinear], input: Tensor) -> list[Products] | None:
    """Where the products of each run; None where all are torch's."""
    rows = math.prod(input.shape[:-1])
    if rows == 0:
        return None
    found = [
        one.__dict__["routes"].of(rows, one.weight.shape[1], one.weight.shape[0]) for one in linears
    ]
    return None if all(products.plain for products in found) else found


def _chain(linears: Sequence[RoutedLinear], chosen: Sequence[Products], input: Tensor) -> Tensor:
    """Layers with a ReLU between each two of them. Input [..., in]: [..., out]."""
    found = input.reshape(-1, input.shape[-1])
    for number, (one, products) in enumerate(zip(linears, chosen, strict=True), 1):
        found = _Linear.apply(  # type: ignore[no-untyped-call]
            found, one.weight, one.bias, products, number < len(linears), number > 1
        )
    return found.view(*input.shape[:-1], found.shape[-1])


def _is_plain(input: Any, *linears: nn.Linear) -> bool:
    """Whether these are whole float32 matrices on a CPU that fit, and are only computed with."""
    if not isinstance(input, Tensor) or input.dim() == 0:
        return False
    width = input.shape[-1]
    for one in linears:
        if one.weight.dim() != 2 or one.weight.shape[1] != width or width == 0:
            return False
        width = len(one.weight)
    tensors = [tensor for one in linears for tensor in (one.weight, one.bias) if tensor is not None]
    return (
        all(map(_is_matrix, (input, *tensors)))
        and not torch.is_autocast_enabled("cpu")
        and torch.autograd.forward_ad._current_level < 0
        and not torch._C._is_tracing()
    )


def _is_matrix(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _is_batched(grad: Tensor) -> bool:
    """Whether these are many gradients at once, as of `is_grads_batched`."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def route(module: nn.Module, routes: Routes) -> None:
    """Have the `nn.Linear` in a module, at any depth, compute by these routes in training.

    Those of a class of their own, which may compute otherwise, are left alone.
    """
    for child in module.modules():
        if type(child) is nn.Sequential:
            child.__class__ = RoutedSequential
        if type(child) in (nn.Linear, RoutedLinear):
            child.__class__ = RoutedLinear
            child.__dict__["routes"] = routes
