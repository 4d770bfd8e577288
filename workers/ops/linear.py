"""`nn.Linear` whose products run where they were measured to be fastest.

Three products of a layer: forward, x W^T; grad_input, g W; grad_weight, g^T x. Each has a route:
    torch: its own BLAS.
    onednn: the oneDNN inside torch. Weights are packed at each call, since they change each step.
    native: the product on which our kernels for a CPU are built (`cuda/src/gemm.h`); its bits do
        not depend on threads.
Routes are chosen before a training (`workers/profiling/linear.py`) and stay what they are in it:
sums in float32 have another order on another route, so the bits of a result go with the choice.

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


def forward(route: str, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows [N, in], weight [out, in], bias [out]: [N, out]."""
    if route == NATIVE:
        found: Tensor = _native(rows, weight, bias)
        return found
    return _onednn(rows, weight, bias) if route == ONEDNN else F.linear(rows, weight, bias)


def grad_input(route: str, grad: Tensor, weight: Tensor) -> Tensor:
    """Grad [N, out], weight [out, in]: [N, in]."""
    if route == NATIVE:
        return product.grad_input(grad, weight)
    return _onednn(grad, weight.t(), None) if route == ONEDNN else grad @ weight


def grad_weight(route: str, grad: Tensor, rows: Tensor) -> Tensor:
    """Grad [N, out], rows [N, in]: [out, in]."""
    if route == NATIVE:
        return product.grad_weight(grad, rows)
    return _onednn(grad.t(), rows.t(), None) if route == ONEDNN else grad.t() @ rows


@operation("heterps::linear")
def _native(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product.forward(rows, weight, bias)


def _onednn(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    """Rows [N, in], weight [out, in], bias [out] or None: [N, out]."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, products: Products
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.products = products
        return forward(products.forward, rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        products: Products = ctx.products
        if torch.is_grad_enabled() or not grad.is_contiguous():  # to be differentiated again
            products = _PLAIN
        of_rows, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            grad_input(products.grad_input, grad, weight) if of_rows else None,
            grad_weight(products.grad_weight, grad, rows) if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
        )


class RoutedLinear(nn.Linear):
    """An `nn.Linear` of a training; a copy or pickle of it is a plain one again."""

    def forward(self, input: Tensor) -> Tensor:
        """Input [..., in]: [..., out]."""
        weight, bias = self.weight, self.bias
        if not (self.training and _is_plain(input, weight, bias)):
            return F.linear(input, weight, bias)
        outputs, inputs = weight.shape
        count = input.numel() // inputs if inputs else 0
        products = self.__dict__["routes"].of(count, inputs, outputs) if count else _PLAIN
        if products.plain:
            return F.linear(input, weight, bias)
        rows = input.reshape(count, inputs)
        found: Tensor = _Linear.apply(rows, weight, bias, products)  # type: ignore[no-untyped-call]
        return found.view(*input.shape[:-1], outputs)

    def _get_name(self) -> str:
        return nn.Linear.__name__

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {name: value for name, value in self.__dict__.items() if name != "routes"}
        return object.__new__, (nn.Linear,), state


def _is_plain(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are whole float32 matrices on a CPU, and only computed with."""
    return (
        input.dtype == weight.dtype == torch.float32
        and input.device.type == "cpu"
        and input.layout == torch.strided
        and input.dim() > 0
        and input.is_contiguous()
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and type(input) in (Tensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(input)
    )


def route(module: nn.Module, routes: Routes) -> None:
    """Have the `nn.Linear` in a module, at any depth, compute by these routes in training.

    Those of a class of their own, which may compute otherwise, are left alone.
    """
    for child in module.modules():
        if type(child) in (nn.Linear, RoutedLinear):
            child.__class__ = RoutedLinear
            child.__dict__["routes"] = routes


def of_type(chosen: Sequence[LinearRoute], kind: str) -> list[LinearRoute]:
    """Those that were measured on a resource type."""
    return [one for one in chosen if one.type == kind]
