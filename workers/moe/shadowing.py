"""Which experts every process computes for its own rows, because moving weights costs less.

FasterMoE's dynamic shadowing (PPoPP 2022). A popular expert makes one process the last to finish.
Its weights may instead be broadcast to all processes for one pass, each computes its own rows, and
the gradients are summed back to the owner, who alone has the optimizer's state. A latency model
decides in every forward, on all processes alike, from the loads of that very batch.

The model, with P FLOP/s and V bytes/s of a process, F FLOPs of a row in an expert's forward, and
expert weights of M bytes; rows are D values each. Forward and backward together take

    max over processes w of 3 F B_w / P   +   max_w 4 D N_w / V   +   2 r M / V

where B_w are the rows that w computes, N_w those that it sends or receives, whichever are more, and
r the shadowed experts: rows travel to their expert and back, their gradients too, and weights once
each way. Experts are taken in order of their loads.

Shape suffixes: W processes, E experts.
"""
# ruff: noqa: N803, N806 (shape suffixes are capital letters)

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from workers.moe.group import Rates


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """What an expert costs.

    flops: of one row in forward.
    weight_bytes: of its parameters.
    row_bytes: of a row on its way to an expert.
    """

    flops: float
    weight_bytes: float
    row_bytes: float


@dataclass(frozen=True, slots=True)
class Shadowing:
    """A decision and what it was made by.

    experts: shadowed, ascending.
    seconds: predicted of forward and backward, as decided.
    seconds_without: the same if no expert were shadowed.
    rates: the measured or given ones.
    """

    experts: tuple[int, ...]
    seconds: float
    seconds_without: float
    rates: Rates


def latency(
    counts_WE: Tensor, bounds: Sequence[int], shadowed: Sequence[int], cost: ExpertCost, by: Rates
) -> float:
    """The model's seconds.

    Args:
        counts_WE: int64, rows of each process for each expert.
        bounds: first expert of each process, and their number.
        shadowed: experts that every process computes for itself.
        cost: of an expert.
        by: the rates of a process.
    """
    here_WE = torch.zeros_like(counts_WE)
    here_WE[:, list(shadowed)] = counts_WE[:, list(shadowed)]
    travelling_WE = counts_WE - here_WE
    columns = [travelling_WE[:, a:b].sum(1) for a, b in pairwise(bounds)]
    pairs_WW = torch.stack(columns, dim=1)  # sender, receiver
    computed_W = pairs_WW.sum(0) + here_WE.sum(1)
    pairs_WW.fill_diagonal_(0)
    moved_W = torch.maximum(pairs_WW.sum(0), pairs_WW.sum(1))
    computing = 3 * cost.flops * computed_W.max().item() / by.flops_per_s
    moving = 4 * cost.row_bytes * moved_W.max().item() / by.bytes_per_s
    return computing + moving + 2 * len(shadowed) * cost.weight_bytes / by.bytes_per_s


def decide(counts_WE: Tensor, bounds: Sequence[int], cost: ExpertCost, by: Rates) -> Shadowing:
    """The experts to shadow: of the n highest loads, the n of least latency.

    Where two experts are equally popular, taking one alone gains nothing; so all n are tried for
    which the n-th load is above the mean.
    """
    without = least = latency(counts_WE, bounds, (), cost, by)
    best: list[int] = []
    load_E = counts_WE.sum(0)
    # Stable, so that equal loads are taken in the same order everywhere.
    ranking = load_E.argsort(descending=True, stable=True)
    popular = ranking[: int((load_E * len(load_E) > load_E.sum()).sum())].tolist()
    for n in range(1, len(popular) + 1):
        seconds = latency(counts_WE, bounds, popular[:n], cost, by)
        if seconds < least:
            best, least = popular[:n], seconds
    return Shadowing(tuple(sorted(best)), least, without, by)
