"""Which mode and policy a model runs in, and what is to be expected of it."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from workers.offload.choice.cost import (
    Expected,
    expect_cache,
    expect_ring,
    measure,
    needs_of,
    of_chance,
)
from workers.offload.choice.replay import best
from workers.offload.choice.trace import Trace, TraceError
from workers.offload.experts.packed import PackedExperts
from workers.offload.slots.readers import Readers
from workers.offload.slots.ring import RingPlan, plan_ring

MODES = ("auto", "cache", "ring")
_FEW = 2  # tokens of a forward, of which it can be guessed what the next layer needs
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    mode, policy: cache | ring, and one of `POLICIES`.
    slots: experts that have room in mode cache.
    ahead: further places, for experts that are read before it is certain that they are needed.
    ring: what goes round in mode ring, where memory suffices for it.
    expected: of each mode that was looked at.
    """

    mode: str
    policy: str
    slots: int
    ahead: int
    ring: RingPlan | None
    expected: tuple[Expected, ...]


def choose(
    packed: PackedExperts,
    memory: int,
    mode: str,
    policy: str,
    batch: int,
    k: Sequence[int],
    like: Trace | None,
    readers: int,
    *,
    ahead: bool = True,
) -> Choice:
    """Choose by the arguments of `offload`; k is that of each layer of the file.

    Raises:
        TraceError: `like` is of other layers.
        ValueError: memory does not hold the largest expert, or in mode ring two of them.
        OSError: the disk fails.
    """
    extent = max(layer.extent for layer in packed.layers)
    total = sum(layer.experts for layer in packed.layers)
    slots = min(memory // extent, total)
    if slots < 1:
        raise ValueError(
            f"offload: memory: expected at least {extent} bytes, which the largest expert takes, "
            f"got {memory}"
        )
    places = max(k) if ahead and batch <= _FEW and 8 * max(k) <= slots < total else 0
    slots -= places
    known = None if like is None else _as_in(like, packed, batch)
    if policy == "auto":
        policy = "lfu-decay" if known is None else best(known, slots).policy
    ring = plan_ring(packed.layers, memory) if mode == "ring" or slots > 1 else None
    expected: tuple[Expected, ...] = ()
    if mode == "auto":
        expected = _expect(packed, memory, slots, policy, batch, k, known, ring, readers)
        mode = min(expected, key=lambda one: one.seconds).mode
        for one in expected:
            _log.info("%s%s", one, ": chosen" if one.mode == mode else "")
    if mode == "cache":
        _warn_below_cliff(packed, slots, batch, k)
    return Choice(mode, policy, slots, places, ring, expected)


def _expect(
    packed: PackedExperts,
    memory: int,
    slots: int,
    policy: str,
    batch: int,
    k: Sequence[int],
    known: Trace | None,
    ring: RingPlan | None,
    readers: int,
) -> tuple[Expected, ...]:
    layers = packed.layers
    needs = needs_of(known or of_chance(layers, k, batch), slots, policy)
    rows = batch * sum(k) / max(1.0, needs.needed)
    at_once = max(1, round(needs.missed / len(layers)))
    with Readers(readers) as threads:
        speeds = measure(threads, packed, memory, rows, at_once)
    cache = expect_cache(needs, len(layers), speeds)
    return (cache,) if ring is None else (cache, expect_ring(layers, ring, speeds, needs.needed))


def _as_in(trace: Trace, packed: PackedExperts, batch: int) -> Trace:
    """A trace in forwards of so many tokens, its layers in the order of the file.

    Raises:
        TraceError: it has other layers, or too few tokens for two forwards.
    """
    theirs = [(one.name, one.experts) for one in trace.layers]
    mine = [(one.name, one.experts) for one in packed.layers]
    if sorted(theirs) != sorted(mine):
        raise TraceError(f"like: expected the layers {mine}, got {theirs}")
    tokens = trace.tokens / max(1, len(trace.calls) / len(trace.layers))
    made = trace.in_batches(max(1, round(batch / max(1.0, tokens))))
    if len(made.calls) < 2 * len(mine):
        raise TraceError(
            f"like: expected tokens for two forwards of {batch} at least, got {trace.tokens}"
        )
    return made


def _warn_below_cliff(packed: PackedExperts, slots: int, batch: int, k: Sequence[int]) -> None:
    cycle = sum(min(n, one.experts) for one, n in zip(packed.layers, k, strict=True))
    if slots < min(cycle, sum(one.experts for one in packed.layers)):
        extent = max(one.extent for one in packed.layers)
        warnings.warn(
            f"offload: memory holds {slots} experts, and one token uses {cycle}: hardly any will "
            f"be met in memory; {cycle * extent:,} bytes hold them",
            stacklevel=4,
        )
