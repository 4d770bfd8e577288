"""What a forward will take in either mode, from what this machine was measured to do.

Of a layer and a forward: its experts that are in memory are computed while the others are read,
and these once they have come; no read of a layer begins before the one before it is computed. A
ring's reads go on meanwhile. So

    cache   sum over layers of max(read, compute of hits) + compute of one expert
    ring    max(read of what travels, compute of all)

What is no expert takes its time in both, and is left out.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from workers import ops
from workers.offload.choice.replay import replay
from workers.offload.choice.trace import Call, Trace, TracedLayer
from workers.offload.experts.layout import LayerAt, view_of
from workers.offload.experts.packed import PackedExperts
from workers.offload.slots.memory import fixed
from workers.offload.slots.readers import Read, Readers
from workers.offload.slots.ring import RingPlan

_MOST = 96 << 20  # bytes that are read to see how fast that is
_NEEDS = 60_000  # experts that a trace of chance needs in all
_SEED = 1


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured: bytes a second of experts at random and in order, seconds of computing.

    expert: of one expert with the rows that it has in a forward, in parallel with others.
    """

    scattered: float
    in_order: float
    expert: float


@dataclass(frozen=True, slots=True)
class Expected:
    """What a forward is expected to take in a mode.

    seconds: of its experts alone.
    bytes_read: from the file.
    hit_rate: of the experts that it needs.
    needed: experts that it needs.
    """

    mode: str
    seconds: float
    bytes_read: float
    hit_rate: float
    needed: float

    def __str__(self) -> str:
        return (
            f"{self.mode}: {1e3 * self.seconds:.1f} ms a forward for {self.needed:.0f} experts, "
            f"{self.bytes_read / 1e6:.1f} MB read, {self.hit_rate:.0%} in memory"
        )


def measure(
    readers: Readers,
    packed: PackedExperts,
    memory: int,
    rows: float,
    at_once: int,
    seconds: float = 0.4,
) -> Speeds:
    """Read and compute some experts of a file.

    Args:
        readers: that nobody else uses meanwhile.
        packed: the file.
        memory: bytes that may be used for it.
        rows: that an expert has in a forward.
        at_once: experts at random that are asked for at once.
        seconds: that reads may take, in all.

    Raises:
        OSError: the disk fails.
    """
    layers = packed.layers
    pairs = [(i, e) for i, layer in enumerate(layers) for e in range(layer.experts)]
    step = max(layer.extent for layer in layers)
    count = max(1, min(len(pairs), memory // 2 // step, _MOST // step, 64))
    slots = fixed(count * step)[0].view(count, step)
    scattered = random.Random(_SEED).sample(pairs, count)
    start = random.Random(_SEED).randrange(len(pairs) - count + 1)
    of_random = _read(readers, packed, scattered, slots, min(at_once, count), seconds / 2)
    in_order = _read(readers, packed, pairs[start : start + count], slots, count, seconds / 2)
    return Speeds(of_random, in_order, _compute(layers, slots, rows))


def _read(
    readers: Readers,
    packed: PackedExperts,
    pairs: Sequence[tuple[int, int]],
    memory: torch.Tensor,
    at_once: int,
    seconds: float,
) -> float:
    """Bytes a second."""
    begin, size = perf_counter(), 0
    for at in range(0, len(pairs), at_once):
        reads = []
        for slot, (layer, expert) in enumerate(pairs[at : at + at_once], start=at):
            into = view_of(memory[slot, : packed.layers[layer].extent])
            read = Read(packed, slot, layer, expert, [into], compared=False)
            readers.begin(read)
            reads.append(read)
            size += into.nbytes
        for read in reads:
            readers.wait(read)
            if isinstance(read.error, OSError):
                raise read.error
        if perf_counter() - begin > seconds:
            break
    return size / (perf_counter() - begin)


def _compute(layers: Sequence[LayerAt], memory: torch.Tensor, rows: float) -> float:
    """Seconds of an expert, of those of the largest layer; of modules, of matrices as large."""
    layer = max(layers, key=lambda one: one.extent)
    dtype = layer.tensors[0].dtype
    dim = layer.tensors[0].shape[0] if layer.tensors[0].shape else 1
    hidden = max(1, layer.extent // dtype.itemsize // (2 * max(1, dim)))
    count = len(memory)
    many = max(1, round(rows))
    size = 2 * dim * hidden * dtype.itemsize
    w1 = memory[:, : size // 2].contiguous().view(dtype).view(count, dim, hidden)
    w2 = memory[:, size // 2 : size].contiguous().view(dtype).view(count, hidden, dim)
    offsets = torch.arange(count + 1) * many
    x = torch.zeros(count * many, dim, dtype=dtype)
    taken = []
    for _ in range(3):
        begin = perf_counter()
        ops.grouped_ffn(x, offsets, w1, w2, "relu")
        taken.append((perf_counter() - begin) / count)
    return min(taken)


def of_chance(layers: Sequence[LayerAt], k: Sequence[int], tokens: int) -> Trace:
    """A trace of tokens that choose among all experts alike: the worst that a cache can meet."""
    draw = random.Random(_SEED)
    traced = tuple(TracedLayer(one.name, one.experts, one.extent) for one in layers)
    need = sum(_distinct(one.experts, n, tokens) for one, n in zip(layers, k, strict=True))
    calls = []
    for _ in range(max(4, min(200, int(_NEEDS / max(1.0, need))))):
        for i, (layer, n) in enumerate(zip(layers, k, strict=True)):
            every, enough = range(layer.experts), min(tokens, 40 * layer.experts)
            chosen = {e for _ in range(enough) for e in draw.sample(every, n)}
            calls.append(Call(i, tokens, tuple(sorted(chosen))))
    return Trace(traced, tuple(calls))


def _distinct(experts: int, k: int, tokens: int) -> float:
    """Experts that so many tokens need, of choices of k by chance."""
    return experts * (1.0 - (1.0 - k / experts) ** tokens)


@dataclass(frozen=True, slots=True)
class Needs:
    """Of a forward: experts that it needs and that it misses, and bytes of these."""

    needed: float
    missed: float
    bytes_read: float


def needs_of(trace: Trace, slots: int, policy: str) -> Needs:
    """Of the second half of a trace's forwards, when the slots are full."""
    layers = len(trace.layers)
    half = len(trace.calls) // 2 // layers * layers
    outcome = replay(trace, slots, policy, after=half)
    forwards = max(1.0, (len(trace.calls) - half) / layers)
    needed = (outcome.hits + outcome.misses) / forwards
    return Needs(needed, outcome.misses / forwards, outcome.bytes_read / forwards)


def expect_cache(needs: Needs, layers: int, speeds: Speeds) -> Expected:
    """Of forwards with these needs; layers are taken for alike."""
    hits = needs.needed - needs.missed
    seconds = max(needs.bytes_read / speeds.scattered, hits * speeds.expert)
    seconds += min(needs.missed, layers) * speeds.expert
    rate = hits / max(1.0, needs.needed)
    return Expected("cache", seconds, needs.bytes_read, rate, needs.needed)


def expect_ring(
    layers: Sequence[LayerAt], plan: RingPlan, speeds: Speeds, needed: float
) -> Expected:
    """Of any forward that goes through all layers in their order."""
    travels = [s for s, stays in zip(plan.sections, plan.stays, strict=True) if not stays]
    read = sum((one.last - one.first) * layers[one.layer].extent for one in travels)
    total = sum(layer.experts for layer in layers)
    moved = sum(one.last - one.first for one in travels)
    seconds = max(read / speeds.in_order, needed * speeds.expert)
    return Expected("ring", seconds, read, 1 - moved / total, needed)
