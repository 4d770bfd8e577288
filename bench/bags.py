"""Pooled bags of `SparseEmbedding` beside `torch.nn.functional.embedding_bag` on the same rows.

Forward and backward, from rows that were pulled to their gradient, on one thread. Both take turns
in one run, since machines drift; the figures to read are the ratios of processor time.

    python -m bench.bags [--rounds 15] [--json FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from bench.pages import RESULTS, machine, versions, write
from heterps import PAD, SparseEmbedding
from workers.embedding.sparse import bind_rows, unique_keys

BAGS, LENGTH, KEYS = 2048, 30, 20_000
DIMS: Final = (8, 16, 32, 64, 128)
POOLINGS: Final = ("sum", "mean", "max")


def contestants(pooling: str, padded: bool, dim: int) -> tuple[Callable[[], Tensor], ...]:
    """Ours and torch's: each gives the gradient of the distinct rows."""
    random = torch.Generator().manual_seed(0)
    keys = torch.randint(0, KEYS, (BAGS, LENGTH), generator=random)
    if padded:  # bags of 0 to 30 keys
        lengths = torch.randint(0, LENGTH + 1, (BAGS, 1), generator=random)
        keys = torch.where(torch.arange(LENGTH) < lengths, keys, PAD)
    distinct, inverse, there = unique_keys(keys.reshape(-1).numpy())
    positions = torch.from_numpy(inverse)
    count = len(distinct)
    rows = torch.randn(count, dim, generator=random)
    factors = torch.randn(BAGS, dim, generator=random)
    layer = SparseEmbedding("bags", dim, pooling=pooling)
    of_torch = positions.view(BAGS, LENGTH)
    beyond = rows
    if padded:
        of_torch = torch.where(keys == PAD, count, of_torch)
        beyond = torch.cat([rows, torch.zeros(1, dim)])

    def ours() -> Tensor:
        given = rows.clone().requires_grad_()
        bind_rows([layer], given, positions, padded=there is not None)
        layer(keys).backward(factors)
        assert given.grad is not None
        return given.grad

    def theirs() -> Tensor:
        given = beyond.clone().requires_grad_()
        padding = count if padded else None
        embedding_bag(of_torch, given, mode=pooling, padding_idx=padding).backward(factors)
        assert given.grad is not None
        return given.grad[:count]

    return ours, theirs


def seconds(run: Callable[[], Tensor]) -> float:
    """Processor time of one run."""
    began = time.process_time()
    run()
    return time.process_time() - began


def compared(pooling: str, padded: bool, dim: int, rounds: int) -> dict[str, Any]:
    """The median of the rounds' ratios, with the medians of both."""
    ours, theirs = contestants(pooling, padded, dim)
    torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-4)
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    found = {
        "pooling": pooling,
        "padded": padded,
        "dim": dim,
        "ours_s": statistics.median(one for one, _ in pairs),
        "torch_s": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(one / other for one, other in pairs),
    }
    half = " half filled with PAD" if padded else ""
    print(f"{pooling}, dim {dim}{half}: x {found['ratio']:.2f} of torch's time", flush=True)
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="bench.bags", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULTS / "bags.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        compared(pooling, padded, dim, options.rounds)
        for pooling in POOLINGS
        for padded in (False, True)
        for dim in DIMS
    ]
    document = {
        "machine": machine(),
        "versions": versions("torch"),
        "bags": BAGS,
        "length": LENGTH,
        "results": found,
    }
    write(options.json, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
