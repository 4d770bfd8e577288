"""The row cache against one of the same rules in plain Python, on each device that is present."""

from typing import Any

import pytest
import torch

from workers.ops import _ops, row_cache
from workers.ops.row_cache import RowCache


class Plain:
    """A cache of the same rules, in plain Python."""

    def __init__(self, cache: RowCache) -> None:
        self.cache = cache
        self.slots: dict[int, list[int]] = {}  # slot -> [key, used, score]

    def find(self, key: int) -> int:
        for slot, entry in self.slots.items():
            if entry[0] == key:
                entry[1] = self.cache.tick
                entry[2] = entry[2] + 1 if self.cache.lfu else self.cache.tick
                return slot
        return -1

    def admit(self, key: int, first: int) -> int:
        lowest = -1
        for slot in range(first, first + self.cache.ways):
            entry = self.slots.get(slot)
            if entry is None:
                lowest = slot
                break
            if entry[1] != self.cache.tick and (lowest < 0 or entry[2] < self.slots[lowest][2]):
                lowest = slot
        if lowest >= 0:
            self.slots[lowest] = [key, self.cache.tick, 1 if self.cache.lfu else self.cache.tick]
        return lowest


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("capacity", "ways"), [(1, 1), (12, 4), (64, 32)])
def test_row_cache_keeps_its_rules(
    native_device: str, policy: Any, capacity: int, ways: int
) -> None:
    cache = RowCache(capacity, 2, ways=ways, policy=policy, device=native_device)
    plain, generator = Plain(cache), torch.Generator().manual_seed(capacity)
    for _ in range(30):
        cache.advance()
        keys = (torch.randn(20, generator=generator) * 20).long().unique()
        slots = cache.find(keys.to(native_device)).cpu()
        assert slots.tolist() == [plain.find(key) for key in keys.tolist()]
        missing = keys[slots < 0]
        sets = torch.empty_like(missing)
        _ops.row_cache_set(missing, cache.sets, sets)
        admitted = cache.admit(missing.to(native_device))
        before = {slot: entry[0] for slot, entry in plain.slots.items()}
        pairs = zip(missing.tolist(), sets.tolist(), strict=True)
        expected = [plain.admit(key, first * ways) for key, first in pairs]
        assert admitted.slots.tolist() == expected
        gone = {slot: key for slot, key in before.items() if plain.slots[slot][0] != key}
        got = zip(admitted.evicted_slots.tolist(), admitted.evicted_keys.tolist(), strict=True)
        assert dict(got) == gone
    assert cache.hits > 0
    assert cache.misses > 0
    keys, slots = cache.held()
    assert dict(zip(slots.tolist(), keys.tolist(), strict=True)) == {
        slot: entry[0] for slot, entry in plain.slots.items()
    }


def test_opcheck(native_device: str) -> None:
    cache = RowCache(12, 2, ways=4, device=native_device)
    cache.admit(torch.tensor([3, 5, 8]).to(native_device))
    cache.advance()
    keys = torch.tensor([5, 4, 9]).to(native_device)
    state = cache.keys, cache.used, cache.score, cache.ways, cache.lfu, cache.tick, keys
    torch.library.opcheck(row_cache._find.op, state)
    sets = torch.empty(3, dtype=torch.int64)
    _ops.row_cache_set(keys.cpu(), cache.sets, sets)
    torch.library.opcheck(row_cache._admit.op, (*state, sets.argsort().to(native_device)))


def test_row_cache_refuses() -> None:
    for wrong, message in (
        ({"ways": 33}, "ways: expected 1 to 32, got 33"),
        ({"policy": "fifo"}, "policy: expected lru or lfu, got fifo"),
        ({"capacity": 0}, "capacity=0, dim=2: expected at least 1"),
        ({"device": "meta"}, "device: expected one with native kernels, got meta"),
    ):
        arguments: dict[str, Any] = {"capacity": 4, "dim": 2, **wrong}
        with pytest.raises(ValueError, match=message):
            RowCache(**arguments)
