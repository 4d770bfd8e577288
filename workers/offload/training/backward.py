"""A layer whose experts come for its forward and again for its backward, with their gradients."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.offload.experts.layout import LayerAt
from workers.offload.training.training import weights_of
from workers.ops.grouped_ffn import backend_for

_ffn = torch.ops.heterps.grouped_ffn
_ffn_backward = torch.ops.heterps.grouped_ffn_backward


class Trained(Protocol):
    """What has experts and takes their gradients: at once, or for a step that is judged first.

    Attributes:
        broken: the error that ended it.
    """

    broken: BaseException | None

    def require_stepped(self, layer: int) -> None:
        """See that a forward may begin."""

    def arrive(
        self, layer: int, experts: Sequence[int]
    ) -> Generator[tuple[int, dict[str, Tensor]], None, None]:
        """Experts of a layer as they come, each with its tensors by name."""

    def begin_backward(self, layer: int) -> None:
        """Of a layer, of whose experts gradients follow."""

    def update(
        self, layer: int, expert: int, tensors: dict[str, Tensor], gradients: list[Tensor]
    ) -> None:
        """Take the gradients of an expert that has arrived, in its layer's backward."""


class TrainedOutside:
    """One layer's experts."""

    def __init__(
        self, training: Trained, index: int, at: LayerAt, guard: AbstractContextManager[Any]
    ) -> None:
        self.training, self.index, self.at, self.lock = training, index, at, guard
        self._anchor = torch.zeros((), requires_grad=True)  # so that there is a backward

    def run(self, rows_RD: Tensor, offsets: Tensor) -> Tensor:  # noqa: N803
        """Rows [R, D] in the order of their experts -> [R, D]."""
        if rows_RD.device.type != "cpu":
            raise ValueError(f"offload: expected rows on a CPU, got {rows_RD.device}")
        rows = rows_RD
        if torch.is_autocast_enabled("cpu"):  # as `grouped_ffn`, which casts weights, too
            rows = rows.to(torch.get_autocast_dtype("cpu"))
        keep = torch.is_grad_enabled()
        if backend_for(rows, rows, rows) != "native":
            raise RuntimeError(
                f"{self.at.name}: expected native kernels, to train experts one by one with the "
                "bits that they get together, got HETERPS_GROUPED_FFN=loop"
            )
        anchor = self._anchor.view_as(self._anchor)
        apply: Callable[..., Tensor] = _Experts.apply
        return apply(rows, anchor, anchor.grad_fn, offsets, self, keep)


class _Experts(torch.autograd.Function):
    """Experts that come for the forward, and come again for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        anchor: Tensor,
        of_weights: Any,
        offsets: Tensor,
        outside: Any,
        keep: bool,
    ) -> Tensor:
        bounds = offsets.tolist()
        wanted = [e for e in range(outside.at.experts) if bounds[e] < bounds[e + 1]]
        out, pres = torch.empty_like(rows), {}
        w1, w2 = (one.name for one in weights_of(outside.at))
        with outside.lock:
            outside.training.require_stepped(outside.index)
            for e, tensors in outside.training.arrive(outside.index, wanted):
                mine = slice(bounds[e], bounds[e + 1])
                out[mine], pres[e] = _ffn(
                    rows[mine],
                    torch.tensor([0, bounds[e + 1] - bounds[e]]),
                    tensors[w1][None].to(rows.dtype),
                    tensors[w2][None].to(rows.dtype),
                    outside.at.activation,
                    keep,
                )
        # In an order that is the same where a checkpoint of activations computes them again.
        ctx.save_for_backward(rows, *(pres[e] for e in wanted))
        ctx.bounds, ctx.wanted, ctx.outside = bounds, wanted, outside
        ctx.of_weights = of_weights
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, *pres = ctx.saved_tensors
        pre = dict(zip(ctx.wanted, pres, strict=True))
        outside, bounds = ctx.outside, ctx.bounds
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        grad = grad.contiguous()
        w1, w2 = (one.name for one in weights_of(outside.at))
        # Not by autograd.grad() of something else, which leaves parameters' gradients alone.
        learns = torch._C._will_engine_execute_node(ctx.of_weights)
        training = outside.training
        with outside.lock:
            if learns:
                training.begin_backward(outside.index)
            try:
                for e, tensors in training.arrive(outside.index, ctx.wanted):
                    mine = slice(bounds[e], bounds[e + 1])
                    part, *weights = _ffn_backward(
                        grad[mine],
                        rows[mine],
                        torch.tensor([0, bounds[e + 1] - bounds[e]]),
                        pre[e],
                        tensors[w1][None].to(rows.dtype),
                        tensors[w2][None].to(rows.dtype),
                        outside.at.activation,
                        of_rows is not None,
                        learns,
                    )
                    if of_rows is not None:
                        of_rows[mine] = part
                    if learns:
                        dtype = tensors[w1].dtype  # under autocast not that of the rows
                        gradients = [one[0].to(dtype) for one in weights]
                        training.update(outside.index, e, tensors, gradients)
            except BaseException as error:
                if learns and training.broken is None:  # some have their gradients, others not
                    training.broken = error
                raise
        return of_rows, None, None, None, None, None
