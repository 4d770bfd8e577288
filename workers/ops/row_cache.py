"""`RowCache`: rows by key on a device, set-associative, the least used giving way.

A key belongs to one set of `ways` slots; in a full set the slot gives way that was used longest
ago (lru) or least often (lfu), but none that was used in the current tick. The layout is that of
FBGEMM's cache: a warp looks at a set, a lane at a way. Which keys lie where is the same on a CPU
and on a GPU.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workers.ops import _ops
from workers.ops.native import device_of, native_for, stream
from workers.ops.operation import operation

Policy = Literal["lru", "lfu"]


@operation("heterps::row_cache_find", mutates_args=("used", "score"))
def _find(
    cache_keys: Tensor, used: Tensor, score: Tensor, ways: int, lfu: bool, tick: int, keys: Tensor
) -> Tensor:
    slots = torch.empty_like(keys)
    with device_of(keys):
        _ops.row_cache_find(
            cache_keys,
            used,
            score,
            ways,
            lfu,
            tick,
            keys,
            slots,
            stream(keys),
            torch.get_num_threads(),
        )
    return slots


@_find.register_fake
def _(
    cache_keys: Tensor, used: Tensor, score: Tensor, ways: int, lfu: bool, tick: int, keys: Tensor
) -> Tensor:
    return torch.empty_like(keys)


@operation("heterps::row_cache_admit", mutates_args=("cache_keys", "used", "score"))
def _admit(
    cache_keys: Tensor,
    used: Tensor,
    score: Tensor,
    ways: int,
    lfu: bool,
    tick: int,
    keys: Tensor,
    order: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    slots, left = torch.empty_like(keys), torch.empty_like(keys)
    evicted = torch.empty_like(keys, dtype=torch.uint8)
    with device_of(keys):
        _ops.row_cache_admit(
            cache_keys,
            used,
            score,
            ways,
            lfu,
            tick,
            keys,
            order,
            slots,
            left,
            evicted,
            stream(keys),
            torch.get_num_threads(),
        )
    return slots, left, evicted


@_admit.register_fake
def _(
    cache_keys: Tensor,
    used: Tensor,
    score: Tensor,
    ways: int,
    lfu: bool,
    tick: int,
    keys: Tensor,
    order: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(keys),
        torch.empty_like(keys),
        torch.empty_like(keys, dtype=torch.uint8),
    )


@dataclass(frozen=True, slots=True)
class Admitted:
    """Where new keys went, and which gave way.

    slots: int64 [N], -1 where every slot of the set was used in this tick.
    evicted_keys: int64 [M], those that gave way.
    evicted_slots: int64 [M], where each lay, its row still there.
    """

    slots: Tensor
    evicted_keys: Tensor
    evicted_slots: Tensor


class RowCache:
    """Rows [sets * ways, dim] and what key each belongs to.

    Args:
        capacity: rows to hold, rounded up to whole sets.
        dim: floats a row.
        ways: slots of a set, 1 to 32.
        policy: lru | lfu.
        device: where the rows lie.

    Raises:
        ValueError: an argument out of range, or a device without native kernels.

    Attributes:
        rows: float32 [slots, dim].
        hits: keys that were found.
        misses: keys that were not.
    """

    def __init__(
        self,
        capacity: int,
        dim: int,
        *,
        ways: int = 32,
        policy: Policy = "lru",
        device: str | torch.device = "cpu",
    ) -> None:
        if capacity < 1 or dim < 1:
            raise ValueError(f"RowCache: capacity={capacity}, dim={dim}: expected at least 1")
        if not 1 <= ways <= 32:
            raise ValueError(f"RowCache: ways: expected 1 to 32, got {ways}")
        if policy not in ("lru", "lfu"):
            raise ValueError(f"RowCache: policy: expected lru or lfu, got {policy}")
        self.sets, self.ways, self.lfu = -(-capacity // ways), ways, policy == "lfu"
        slots = self.sets * ways
        self.rows = torch.zeros(slots, dim, device=device)
        if not native_for(self.rows):
            raise ValueError(f"RowCache: device: expected one with native kernels, got {device}")
        self.keys = torch.zeros(slots, dtype=torch.int64, device=device)
        self.used = torch.full_like(self.keys, -1)
        self.score = torch.zeros_like(self.keys)
        self.tick = self.hits = self.misses = 0

    def advance(self) -> None:
        """Begins a new tick: what was used before may give way."""
        self.tick += 1

    def find(self, keys: Tensor, *, count: bool = True) -> Tensor:
        """The slots of distinct keys int64 [N] on the cache's device, -1 of those not here."""
        slots: Tensor = _find(
            self.keys, self.used, self.score, self.ways, self.lfu, self.tick, keys
        )
        if count:
            found = int((slots >= 0).sum())
            self.hits += found
            self.misses += len(keys) - found
        return slots

    def admit(self, keys: Tensor) -> Admitted:
        """Makes room for distinct keys int64 [N] that are not here; their rows are the caller's."""
        host = keys.cpu().contiguous()
        sets = torch.empty_like(host)
        _ops.row_cache_set(host, self.sets, sets)
        order = sets.argsort(stable=True).to(keys.device)
        slots, left, evicted = _admit(
            self.keys, self.used, self.score, self.ways, self.lfu, self.tick, keys, order
        )
        gave = evicted.bool()
        return Admitted(slots, left[gave], slots[gave])

    def held(self) -> tuple[Tensor, Tensor]:
        """(keys, slots) of all rows here."""
        slots = (self.used >= 0).nonzero().flatten()
        return self.keys[slots], slots

    def clear(self) -> None:
        """Forgets all rows; the counters stay."""
        self.used.fill_(-1)
