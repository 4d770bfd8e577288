"""The products of an `nn.Linear`, each where it was measured to be fastest.

Three products of a layer: forward, x W^T; grad_input, g W; grad_weight, g^T x. Each has a route:
    torch: its own BLAS.
    onednn: the oneDNN inside torch. Weights are packed at each call, since they change each step.
    native: the product on which our kernels for a CPU are built (`cuda/src/gemm.h`); its bits do
        not depend on threads.
Routes are chosen before a training (`workers/profiling/linear.py`) and stay what they are in it:
sums in float32 have another order on another route, so the bits of a result go with the choice.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
        self._other = {
            size for size, some in self._sizes.items() if not all(own.plain for _, own in some)
        }

    def concern(self, layer: nn.Linear) -> bool:
        """Whether they may say of a layer anything but that torch computes it."""
        size = (layer.in_features, layer.out_features)
        return self._seen is not None or size in self._other

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


def of_type(chosen: Sequence[LinearRoute], kind: str) -> list[LinearRoute]:
    """Those that were measured on a resource type."""
    return [one for one in chosen if one.type == kind]
