"""`heterps::route`: the experts that each token chooses, and its pairs in their order.

A pair is (token, choice), its flat index `token * k + choice`; `route` groups the pairs by expert.

Shapes: T tokens, E experts, K choices, R rows in expert order (T*K unless pairs were dropped; a
dropped pair has a negative `inverse`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import device_of, native, native_for, on_cuda, stream
from workers.ops.operation import operation


@operation("heterps::route")
def _route(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(
            f"route: logits: expected float32 [tokens, experts], got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    experts = logits.shape[1]
    if not 1 <= k <= experts:
        raise ValueError(f"route: k: expected 1 to {experts} (the number of experts), got {k}")
    if not native_for(logits):
        return _route_torch(logits, k)
    chosen, order, inverse, offsets = _route_empty(logits, k)
    if on_cuda(logits):
        workspace = _workspace(chosen, experts)
        with device_of(logits):
            _ops.route(
                native(logits), k, chosen, order, inverse, offsets, workspace, stream(logits)
            )
    else:
        threads = torch.get_num_threads()
        _ops.route(native(logits), k, chosen, order, inverse, offsets, threads=threads)
    return chosen, order, inverse, offsets


@_route.register_fake
def _route_empty(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    pairs = tokens * k
    return (
        logits.new_empty((tokens, k), dtype=torch.int32),
        logits.new_empty((pairs,), dtype=torch.int64),
        logits.new_empty((pairs,), dtype=torch.int64),
        logits.new_empty((experts + 1,), dtype=torch.int64),
    )


def _workspace(chosen: Tensor, experts: int) -> Tensor:
    return chosen.new_empty(_ops.group_workspace(chosen.numel(), experts), dtype=torch.int64)


@operation("heterps::group")
def _group(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if chosen.dim() != 2 or chosen.dtype != torch.int32:
        raise ValueError(
            f"group: chosen: expected int32 [tokens, choices], got {chosen.dtype} "
            f"{list(chosen.shape)}"
        )
    if experts < 1:
        raise ValueError(f"group: experts: expected at least 1, got {experts}")
    if not _native_here(chosen):
        return _group_torch(chosen, experts)
    order, inverse, offsets = _group_empty(chosen, experts)
    flat = native(chosen).flatten()
    workspace = _workspace(flat, experts) if on_cuda(chosen) else None
    with device_of(chosen):
        _ops.group(flat, experts, order, inverse, offsets, workspace, stream(chosen))
    return order, inverse, offsets


@_group.register_fake
def _group_empty(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    pairs = chosen.shape[0] * chosen.shape[1]
    order, inverse = (chosen.new_empty((pairs,), dtype=torch.int64) for _ in range(2))
    return order, inverse, chosen.new_empty((experts + 1,), dtype=torch.int64)


def _native_here(chosen: Tensor) -> bool:
    """As of logits: the kernels' element types are floating ones."""
    return native_for(chosen.new_empty(0, dtype=torch.float32))


def _route_torch(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    infinity = float("inf")
    # Adding zero turns -0.0 into 0.0, so that the two tie.
    keys = logits.detach().nan_to_num(nan=-infinity, posinf=infinity, neginf=-infinity) + 0.0
    chosen = keys.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()
    return chosen.int(), *_group_torch(chosen, logits.shape[1])


def _group_torch(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, inverse, offsets) of the choices [T, K]."""
    flat = chosen.flatten().long()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    bounds = torch.arange(experts + 1, device=order.device)
    return order, inverse, torch.searchsorted(flat[order], bounds)


@dataclass(frozen=True, slots=True)
class Routing:
    """Which expert each pair goes to, and the pairs grouped by expert.

    chosen: int32 [T, K]; of `route`, best first, and equal logits go to the lower expert.
    order: int64 [R], flat pair of each row; ascending inside an expert.
    inverse: int64 [T*K], row of each pair; negative where it was dropped.
    offsets: int64 [E+1]; expert e owns rows offsets[e] to offsets[e+1].
    """

    chosen: Tensor
    order: Tensor
    inverse: Tensor
    offsets: Tensor

    @property
    def k(self) -> int:
        """Choices of each token."""
        return self.chosen.shape[1]

    @property
    def counts(self) -> Tensor:
        """Rows of each expert, int64 [E]."""
        return self.offsets.diff()

    def limited(self, capacity: int, first_choices_first: bool = False) -> "Routing":
        """The same with at most `capacity` rows for each expert: its later tokens are dropped.

        Args:
            capacity: rows that an expert keeps.
            first_choices_first: an expert drops what is a token's second choice before any first
                one, and so on.
        """
        experts = torch.repeat_interleave(self.counts, output_size=self.order.shape[0])
        position = torch.arange(self.order.shape[0], device=self.order.device)
        if first_choices_first:
            ranked = (experts * self.k + self.order % self.k).argsort(stable=True)
            position = torch.empty_like(ranked).scatter(0, ranked, position)
        return self._kept(position - self.offsets[experts] < capacity)

    def only(self, pairs: Tensor) -> "Routing":
        """The same without the pairs that are false in `pairs`, bool [T, K]."""
        return self._kept(pairs.flatten()[self.order])

    def _kept(self, rows: Tensor) -> "Routing":
        """The same with the rows that are true in `rows`, bool [R]."""
        order = self.order[rows]
        inverse = torch.full_like(self.inverse, -1)
        inverse[order] = torch.arange(order.shape[0], device=order.device)
        before = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
        return Routing(self.chosen, order, inverse, before[self.offsets])


def route(logits: Tensor, k: int) -> Routing:
    """Chooses the k experts of highest logit for each token (NaN counts as -inf).

    logits: float32 [T, E]. Raises ValueError for another dtype or shape, or k outside 1..E.
    """
    return Routing(*_route(logits, k))


def group(chosen: Tensor, experts: int) -> Routing:
    """The routing of choices int32 [T, K] made elsewhere, each from 0 to experts - 1.

    Raises:
        ValueError: another type or shape, or no expert.
        IndexError: an expert that there is not; on a CUDA device the caller answers for them.
    """
    return Routing(chosen, *_group(chosen, experts))
