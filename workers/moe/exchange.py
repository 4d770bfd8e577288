"""Rows to the processes that hold their experts, and back: exact counts, one step or two.

Every process knows how many rows each of them sends to each expert, so each knows the layout of
what arrives, and only rows travel. A `Plan` is a permutation of rows over processes; its gradient
is the same permutation backwards. `start` begins it and `finish` waits, in forward and in backward,
so that the experts compute on other rows in between.

Shape suffixes: W processes, E experts, S rows sent, A rows that arrive, D width.
"""
# ruff: noqa: N803, N806 (shape suffixes are capital letters)

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.errors import peers_needed
from workers.moe.group import ExpertGroup


@dataclass(frozen=True, slots=True)
class Hop:
    """One all-to-all: rows are taken in the order `index`, then `sent` and `received` by rank."""

    group: dist.ProcessGroup | None
    index: Tensor | None
    sent: list[int]
    received: list[int]


@dataclass(slots=True)
class Plan:
    """How rows travel in one exchange.

    hops: the all-to-alls in turn; the last is the slowest link, and the one that is overlapped.
    order: of the rows as they arrive, int64 [A], which groups them by expert, then by sender.
    counts: rows of each of this process's experts.
    """

    hops: list[Hop]
    order: Tensor
    counts: list[int]
    _works: dict[str, tuple[dist.Work | None, Tensor]] = field(default_factory=dict)

    def begin(self, key: str, rows: Tensor, back: bool) -> Tensor:
        """Starts moving rows; the result is what `end` will have filled, but for its order."""
        if back:
            rows = torch.empty_like(rows).index_copy_(0, self.order, rows)
        else:
            for hop in self.hops[:-1]:
                rows = _all_to_all(rows, hop, back=False)[1]
        work, moved = _all_to_all(rows, self.hops[-1], back, wait=False)
        self._works[key] = work, moved.detach()
        return moved

    def end(self, key: str, back: bool) -> Tensor:
        """Waits for what `begin` started."""
        work, rows = self._works.pop(key)
        if work is not None:
            with peers_needed():
                work.wait()
        if not back:
            return rows[self.order]
        rows = _in_order(rows, self.hops[-1].index)
        for hop in reversed(self.hops[:-1]):
            rows = _in_order(_all_to_all(rows, hop, back=True)[1], hop.index)
        return rows


def make_plan(
    counts_WE: Tensor, bounds: list[int], group: ExpertGroup, device: torch.device
) -> Plan:
    """The plan of the exchange in which process w sends counts_WE[w, e] rows to expert e.

    Args:
        counts_WE: int64 on the CPU, the same on all processes; a process has its rows by expert.
        bounds: first expert of each rank, and their number.
        group: the processes.
        device: of the rows.
    """
    rank, size = group.rank, group.size
    owned = [counts_WE[:, a:b] for a, b in pairwise(bounds)]
    pairs_WW = torch.stack([part.sum(1) for part in owned], dim=1)  # sender, receiver
    mine_WE = owned[rank]
    local = mine_WE.shape[1]
    by_expert = torch.arange(size * local).view(size, local).T.flatten()
    order = block_order(mine_WE.flatten(), by_expert).to(device)
    counts = mine_WE.sum(0).tolist()
    if group.per_host is None:
        sent, received = pairs_WW[rank].tolist(), pairs_WW[:, rank].tolist()
        return Plan([Hop(group.processes, None, sent, received)], order, counts)
    return Plan(_two_hops(pairs_WW, group, group.per_host, device), order, counts)


def _two_hops(pairs_WW: Tensor, group: ExpertGroup, p: int, device: torch.device) -> list[Hop]:
    """Inside the host by the receiver's place in its host, then between hosts."""
    hosts = group.size // p
    host, place = divmod(group.rank, p)
    pairs = pairs_WW.view(hosts, p, hosts, p)  # host and place of the sender, of the receiver
    outgoing = pairs[host, place]  # [hosts, p]
    by_place = torch.arange(hosts * p).view(hosts, p).T.flatten()
    here = pairs[host, :, :, place]  # [p senders of this host, receiving hosts]
    inside = Hop(
        group.local,
        block_order(outgoing.flatten(), by_place).to(device),
        outgoing.sum(0).tolist(),
        here.sum(1).tolist(),
    )
    by_host = torch.arange(p * hosts).view(p, hosts).T.flatten()
    arriving = pairs[:, :, host, place]  # [sending hosts, p]
    between = Hop(
        group.across,
        block_order(here.flatten(), by_host).to(device),
        here.sum(0).tolist(),
        arriving.sum(1).tolist(),
    )
    return [inside, between]


def block_order(sizes: Tensor, order: Tensor) -> Tensor:
    """Row numbers that put consecutive blocks of rows into another order.

    Args:
        sizes: int64 [n], rows of each block.
        order: int64 [m], the blocks to take.

    Returns:
        int64 [sum of the sizes of the taken blocks].
    """
    starts, taken = sizes.cumsum(0) - sizes, sizes[order]
    total = int(taken.sum())
    shift = starts[order] - (taken.cumsum(0) - taken)
    return torch.repeat_interleave(shift, taken, output_size=total) + torch.arange(total)


def start(rows: Tensor, plan: Plan, back: bool, anchor: Tensor) -> Tensor:
    """Begins to move rows [S, D] to where their experts are, or with `back` from there.

    Args:
        anchor: any tensor that requires a gradient: with it every process takes part in the
            backward pass, also one whose rows need none.
    """
    moving: Tensor = _Start.apply(rows, anchor, plan, back)  # type: ignore[no-untyped-call]
    return moving


def finish(moving: Tensor, plan: Plan, back: bool) -> Tensor:
    """The rows [A, D] of `start`, by expert and then by sender; with `back` as they were sent."""
    rows: Tensor = _Finish.apply(moving, plan, back)  # type: ignore[no-untyped-call]
    return rows


class _Start(torch.autograd.Function):
    """Begins in forward; in backward it waits for what `_Finish` began."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, plan: Plan, back: bool) -> Tensor:
        ctx.plan, ctx.back = plan, back
        return plan.begin(f"forward {back}", rows, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.plan.end(f"backward {ctx.back}", not ctx.back), None, None, None


class _Finish(torch.autograd.Function):
    """Waits in forward; in backward it begins, and `_Start` returns what arrives."""

    @staticmethod
    def forward(ctx: Any, moving: Tensor, plan: Plan, back: bool) -> Tensor:
        ctx.plan, ctx.back, ctx.shape = plan, back, moving.shape
        return plan.end(f"forward {back}", back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.plan.begin(f"backward {ctx.back}", grad, not ctx.back)
        # `_Start` takes the gradient from the plan; this one only has to be of the right shape.
        return grad.new_zeros(1).expand(ctx.shape), None, None


def _all_to_all(
    rows: Tensor, hop: Hop, back: bool, wait: bool = True
) -> tuple[dist.Work | None, Tensor]:
    sent, received = (hop.received, hop.sent) if back else (hop.sent, hop.received)
    if hop.index is not None and not back:
        rows = rows[hop.index]
    out = rows.new_empty((sum(received), rows.shape[1]))
    with peers_needed():
        work = dist.all_to_all_single(
            out, rows.contiguous(), received, sent, group=hop.group, async_op=not wait
        )
    return work, out


def _in_order(rows: Tensor, index: Tensor | None) -> Tensor:
    return rows if index is None else torch.empty_like(rows).index_copy_(0, index, rows)
