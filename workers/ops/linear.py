"""`nn.Linear` whose products run where they were measured to be fastest, and the ReLU between two.

Three products of a layer: forward, x W^T; grad_input, g W; grad_weight, g^T x. Each has a route:
    torch: its own BLAS.
    onednn: the oneDNN inside torch. Weights are packed at each call, since they change each step.
    native: the product on which our kernels for a CPU are built (`cuda/src/gemm.h`); its bits do
        not depend on threads.
Routes are chosen before a training (`workers/profiling/linear.py`) and stay what they are in it:
sums in float32 have another order on another route, so the bits of a result go with the choice.

In an `nn.Sequential` a ReLU between two such layers is computed with their products, while its
numbers are in the cache: forward with those of the layer before it, backward with the gradient that
the layer behind it gives. The layer before gets the gradient of the ReLU's input then.

Whatever else a layer may meet is torch's own: evaluation, so that a loaded model predicts what was
measured; other dtypes and devices, autocast, `torch.compile`, transforms of `torch.func`; and
backwards that are to be differentiated in their turn.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protos.decision_pb2 import LinearRoute
from workers.errors import RouteError
from workers.ops import product
from workers.ops.operation import operation

TORCH, ONEDNN, NATIVE = "torch", "onednn", "native"


@dataclass(frozen=True, slots=True)
class Products:
    """The routes of a layer's products, for some number of rows."""

    forward: str = TORCH
    grad_input: str = TORCH
    grad_weight: str = TORCH

    @property
    def plain(self) -> bool:
        """Whether all are torch's."""
        return self.forward == self.grad_input == self.grad_weight == TORCH


_PLAIN = Products()


class Shape(NamedTuple):
    """What a layer is given, and its size."""

    rows: int
    inputs: int
    outputs: int


def available() -> tuple[str, ...]:
    """The routes that there are on this machine; torch comes first."""
    found = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return (TORCH, ONEDNN, NATIVE) if found else (TORCH, NATIVE)


class Routes:
    """Which products of which layers run where.

    Args:
        chosen: of layers of some sizes at some numbers of rows; others are torch's.
        seen: takes in what layers are computed with these.

    Raises:
        RouteError: a route of them is not here; nothing takes its place by itself.
    """

    def __init__(self, chosen: Iterable[LinearRoute] = (), seen: set[Shape] | None = None) -> None:
        here, self._seen = available(), seen
        self._sizes: dict[tuple[int, int], list[tuple[int, Products]]] = {}
        for one in chosen:
            products = Products(one.forward, one.grad_input, one.grad_weight)
            for route in (products.forward, products.grad_input, products.grad_weight):
                if route not in here:
                    raise RouteError(
                        f"nn.Linear of {one.inputs} inputs and {one.outputs} outputs: the decision "
                        f"has it computed by {route!r}, which PyTorch {torch.__version__} does not "
                        f"have here; expected one of {', '.join(here)}. Have all nodes of type "
                        f"{one.type!r} use one build of PyTorch, or set train.linear: torch"
                    )
            self._sizes.setdefault((one.inputs, one.outputs), []).append((one.rows, products))

    def of(self, rows: int, inputs: int, outputs: int) -> Products:
        """The routes of a layer: those of the nearest number of rows that was measured."""
        if self._seen is not None:
            self._seen.add(Shape(rows, inputs, outputs))
        measured = self._sizes.get((inputs, outputs))
        if measured is None:
            return _PLAIN
        return min(measured, key=lambda one: (abs(math.log(rows / one[0])), one[0]))[1]


def forward(
    route: str, rows: Tensor, weight: Tensor, bias: Tensor | None, relu: bool = False
) -> Tensor:
    """Rows [N, in], weight [out, in], bias [out]: [N, out], with `relu` what a ReLU makes of it."""
    if route == NATIVE:
        return _native(rows, weight, bias, relu)  # type: ignore[no-any-return]
    found = _onednn(rows, weight, bias) if route == ONEDNN else F.linear(rows, weight, bias)
    return found.relu_() if relu else found


def grad_input(route: str, grad: Tensor, weight: Tensor, rectified: Tensor | None = None) -> Tensor:
    """Grad [N, out], weight [out, in]: [N, in].

    With `rectified`, [N, in], the rows that a ReLU gave, it is the gradient of the ReLU's input.
    """
    # Of one output a number is one product, whose bits are those of any route.
    if route == NATIVE or (rectified is not None and len(weight) == 1):
        return product.grad_input(grad, weight, rectified)
    found = _onednn(grad, weight.t(), None) if route == ONEDNN else grad @ weight
    if rectified is None:
        return found
    return torch.ops.aten.threshold_backward.grad_input(  # type: ignore[no-any-return]
        found, rectified, 0, grad_input=found
    )


def grad_weight(route: str, grad: Tensor, rows: Tensor) -> Tensor:
    """Grad [N, out], rows [N, in]: [out, in]."""
    if route == NATIVE:
        return product.grad_weight(grad, rows)
    return _onednn(grad.t(), rows.t(), None) if route == ONEDNN else grad.t() @ rows


@operation("heterps::linear")
def _native(rows: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    return product.forward(rows, weight, bias, relu)


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


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
        if torch.is_grad_enabled():  # to be differentiated again
            found = grad @ weight
            if ctx.rectified:
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
        if self.training and _is_plain(input, self):
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
        if not self.training or torch.compiler.is_compiling():
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


def _leading(modules: Sequence[nn.Module]) -> list[RoutedLinear]:
    """The linear layers with which these begin, a ReLU between each two of them."""
    found: list[RoutedLinear] = []
    for one, relu in zip(modules[::2], [*modules[1::2], None], strict=False):
        if not isinstance(one, RoutedLinear) or not one.training or not _is_itself(one):
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
        and not torch.compiler.is_compiling()
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


def of_type(chosen: Sequence[LinearRoute], kind: str) -> list[LinearRoute]:
    """Those that were measured on a resource type."""
    return [one for one in chosen if one.type == kind]
