"""Experts split over processes: rows go to where their expert is, are computed, and come back.

Each process keeps a contiguous part of the experts and all of the gate. The layer then gives what
it would if each process had every expert, for its own tokens; and the gradients of an expert are
summed over the tokens of all processes. FastMoE (arXiv 2103.13262), FasterMoE (PPoPP 2022), SE-MoE
(arXiv 2205.10034).

Shape suffixes: W processes, E experts, R rows of this process in expert order, D width.
"""
# ruff: noqa: N803, N806 (shape suffixes are capital letters)

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workers.moe.exchange import block_order, finish, make_plan, start
from workers.moe.group import ExpertGroup
from workers.moe.shadowing import ExpertCost, Shadowing, decide

Weights = dict[str, Tensor]
Run = Callable[[Tensor, list[int]], Tensor]  # rows by expert, rows of each -> outputs
RunOne = Callable[[Tensor, Weights], Tensor]  # rows, weights of their expert -> outputs


@dataclass(frozen=True, slots=True)
class ParallelStats:
    """How the last forward pass spread over processes.

    load: int64 [W, E], rows of each process for each expert, dropped ones not among them.
    shadowing: what was decided and why; None where it is off.
    """

    load: Tensor
    shadowing: Shadowing | None


@dataclass(slots=True)
class ExpertParallel:
    """How one layer's experts are split, and the passing of its rows.

    Args:
        group: the processes.
        experts: of all of them together.
        chunks: parts in which rows travel, so that one is computed while another is under way.
        shadow: whether popular experts may be shadowed.
    """

    group: ExpertGroup
    experts: int
    chunks: int
    shadow: bool
    stats: ParallelStats | None = None

    @property
    def bounds(self) -> list[int]:
        """The first expert of each rank, then the number of experts."""
        return self.group.bounds(self.experts)

    @property
    def own(self) -> range:
        """The experts of this process."""
        return range(*self.bounds[self.group.rank :][:2])

    def __deepcopy__(self, memo: Any) -> "ExpertParallel":
        # Process groups cannot be copied; a copy of the layer belongs to the same one.
        return ExpertParallel(self.group, self.experts, self.chunks, self.shadow, self.stats)

    def same_everywhere(self, tensors: Sequence[Tensor]) -> None:
        """Gives these tensors the first process's values."""
        with torch.no_grad():
            for tensor in tensors:
                self.group.broadcast(tensor, 0)

    def run(
        self, rows_RD: Tensor, counts_E: Tensor, run: Run, run_one: RunOne, weights: list[Weights]
    ) -> Tensor:
        """Outputs of the experts for rows [R, D] in expert order; all processes call it.

        Args:
            rows_RD: this process's rows.
            counts_E: int64 [E], of each expert.
            run: computes the experts of this process.
            run_one: computes one expert with given weights.
            weights: of each expert of this process, alike in names and shapes.
        """
        counts_WE = self.group.gather(counts_E).cpu()
        shadowing = self._decide(counts_WE, rows_RD, weights) if self.shadow else None
        self.stats = ParallelStats(counts_WE, shadowing)
        shadowed = shadowing.experts if shadowing else ()
        anchor = torch.zeros(0, device=rows_RD.device, requires_grad=True)
        if self.chunks == 1 and not shadowed:
            return self._exchanged([rows_RD], counts_WE, (), run, anchor, (run_one, weights))[0]
        orders = self._orders(counts_WE[self.group.rank], shadowed)
        order = torch.cat(orders).to(rows_RD.device)
        parts = rows_RD.index_select(0, order).split([len(part) for part in orders])
        outputs = self._exchanged(parts, counts_WE, shadowed, run, anchor, (run_one, weights))
        # `order` is a permutation: a row's output goes back to its place.
        return torch.cat(outputs).index_select(0, order.argsort())

    def _decide(self, counts_WE: Tensor, rows: Tensor, weights: list[Weights]) -> Shadowing:
        own = weights[0].values()
        cost = ExpertCost(
            flops=2.0 * sum(w.numel() for w in own),
            weight_bytes=float(sum(w.nbytes for w in own)),
            row_bytes=float(rows.shape[1] * rows.element_size()),
        )
        return decide(counts_WE, self.bounds, cost, self.group.measured(rows))

    def _orders(self, counts_E: Tensor, shadowed: Sequence[int]) -> list[Tensor]:
        """Row numbers of each chunk, then of each shadowed expert."""
        blocks = self._blocks(counts_E.unsqueeze(0), shadowed)[:, 0].T  # [E, chunks]
        sizes = torch.cat([blocks, (counts_E - blocks.sum(1)).unsqueeze(1)], dim=1)
        numbers = torch.arange(sizes.numel()).view(sizes.shape)
        of_chunks = [block_order(sizes.flatten(), numbers[:, i]) for i in range(self.chunks)]
        of_shadows = [block_order(sizes.flatten(), numbers[[e], self.chunks]) for e in shadowed]
        return of_chunks + of_shadows

    def _blocks(self, counts_WE: Tensor, shadowed: Sequence[int]) -> Tensor:
        """Rows of each chunk [chunks, W, E] that travel: even parts of each expert's rows."""
        travelling_WE = counts_WE.clone()
        travelling_WE[:, list(shadowed)] = 0
        ends = [travelling_WE * i // self.chunks for i in range(self.chunks + 1)]
        return torch.stack([b - a for a, b in pairwise(ends)])

    def _exchanged(
        self,
        parts: Sequence[Tensor],
        counts_WE: Tensor,
        shadowed: Sequence[int],
        run: Run,
        anchor: Tensor,
        shadows: tuple[RunOne, list[Weights]],
    ) -> list[Tensor]:
        """Outputs of `parts`: those of the chunks by way of other processes."""
        plans = [
            make_plan(counts, self.bounds, self.group, parts[0].device)
            for counts in self._blocks(counts_WE, shadowed)
        ]
        moving = [
            start(part, plan, False, anchor) for part, plan in zip(parts, plans, strict=False)
        ]
        # While rows are under way to their experts.
        here = [
            self._shadow(expert, rows, anchor, *shadows)
            for expert, rows in zip(shadowed, parts[self.chunks :], strict=True)
        ]
        returning = []
        for part, plan in zip(moving, plans, strict=True):
            arrived = finish(part, plan, False)
            # As the rows came, also under autocast: a process without any has that dtype to send.
            outputs = run(arrived, plan.counts).to(arrived.dtype)
            returning.append(start(outputs, plan, True, anchor))
        back = [finish(part, plan, True) for part, plan in zip(returning, plans, strict=True)]
        return back + here

    def _shadow(
        self, expert: int, rows: Tensor, anchor: Tensor, run_one: RunOne, weights: list[Weights]
    ) -> Tensor:
        """One expert's outputs for this process's rows, its weights fetched from its owner."""
        bounds = self.bounds
        owner = next(r for r in range(self.group.size) if bounds[r] <= expert < bounds[r + 1])
        mine = owner == self.group.rank
        own = weights[expert - bounds[owner] if mine else 0]
        flat = torch.cat([w.reshape(-1) for w in own.values()])
        flat = flat if mine else flat.detach()
        fetched: Tensor = _Fetch.apply(flat, anchor, owner, self.group)  # type: ignore[no-untyped-call]
        pieces = fetched.split([w.numel() for w in own.values()])
        named = {
            name: piece.view_as(w) for (name, w), piece in zip(own.items(), pieces, strict=True)
        }
        return run_one(rows, named).to(rows.dtype)


class _Fetch(torch.autograd.Function):
    """The owner's weights on every process; their gradients summed on the owner."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, anchor: Tensor, owner: int, group: ExpertGroup) -> Tensor:
        ctx.owner, ctx.group = owner, group
        weights = flat.clone()
        group.broadcast(weights, owner)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.sum_to(total, ctx.owner)
        return total if ctx.owner == ctx.group.rank else None, None, None, None
