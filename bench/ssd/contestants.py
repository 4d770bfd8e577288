"""What is measured: a table of the shards' engine, and stores that hold rows as values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.ssd.steps import RATE, TABLE, Floats, Keys, adagrad


class Contestant(Protocol):
    """What holds rows of weights and states [2, dim]."""

    def fill(self, keys: Keys) -> None:
        """Rows of zeros that have seen a gradient of ones, keys ascending."""

    def step(self, keys: Keys, grads: Floats, coming: Keys) -> None:
        """Read these rows, move them by Adagrad, and have them written.

        Args:
            coming: keys of the step after this one.
        """

    def rows(self, keys: Keys) -> Floats:
        """Weights [n, dim]."""

    @property
    def told(self) -> dict[str, int]:
        """Of files that no folder names their bytes, and what else it counts."""


class Ours:
    """A table of the shards' engine, in this process as the others are."""

    def __init__(self, work: Path, dim: int, memory: int) -> None:
        from ps import LocalTable

        self._table = LocalTable.create(
            "t",
            dim,
            directory=str(work),
            optimizer="adagrad",
            learning_rate=RATE,
            initializer="zeros",
            memory_bytes=memory,
        )
        self._dim = dim

    def fill(self, keys: Keys) -> None:
        self._table.push(keys, np.ones((len(keys), self._dim), np.float32))

    def step(self, keys: Keys, grads: Floats, coming: Keys) -> None:
        self._table.pull(keys)
        self._table.push(keys, grads)

    def rows(self, keys: Keys) -> Floats:
        return self._table.pull(keys, read_only=True)

    @property
    def told(self) -> dict[str, int]:
        return self._table.counters


class Ahead(Ours):
    """The same, told what comes next: its rows are brought into memory during the step before."""

    def __init__(self, work: Path, dim: int, memory: int) -> None:
        super().__init__(work, dim, memory)
        self._thread = ThreadPoolExecutor(1)

    def step(self, keys: Keys, grads: Floats, coming: Keys) -> None:
        brought: Future[None] = self._thread.submit(self._table._table.prefetch, coming, 8)
        super().step(keys, grads, coming)
        brought.result()


class Stored(ABC):
    """Rows as values of a store, their state behind them."""

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def fill(self, keys: Keys) -> None:
        one = np.zeros((2, self._dim), np.float32)
        adagrad(one[None], np.ones((1, self._dim), np.float32))
        value = one.tobytes()
        self.put([(_bytes(key), value) for key in keys.tolist()])

    def step(self, keys: Keys, grads: Floats, coming: Keys) -> None:
        names = [_bytes(key) for key in keys.tolist()]
        rows = np.frombuffer(b"".join(self.get(names)), np.float32)
        rows = rows.reshape(len(keys), 2, self._dim).copy()
        adagrad(rows, grads)
        self.put([(name, row.tobytes()) for name, row in zip(names, rows, strict=True)])

    def rows(self, keys: Keys) -> Floats:
        found = b"".join(self.get([_bytes(key) for key in keys.tolist()]))
        return np.frombuffer(found, np.float32).reshape(len(keys), 2, self._dim)[:, 0]

    @property
    def told(self) -> dict[str, int]:
        return {"disk_bytes": 0}

    @abstractmethod
    def get(self, names: list[bytes]) -> Sequence[bytes]:
        """The values of names, which are all there."""

    @abstractmethod
    def put(self, pairs: list[tuple[bytes, bytes]]) -> None:
        """Write names and their values."""


class Rocks(Stored):
    """RocksDB as embedding stores tune it: no compression, filters, no log, many reads at once."""

    def __init__(self, work: Path, dim: int, memory: int) -> None:
        import rocksdict as rocks

        super().__init__(dim)
        options, blocks = rocks.Options(raw_mode=True), rocks.BlockBasedOptions()
        blocks.set_block_cache(rocks.Cache(memory * 2 // 5))
        blocks.set_bloom_filter(10, False)
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
        blocks.set_block_size(4096)
        options.set_block_based_table_factory(blocks)
        options.set_compression_type(rocks.DBCompressionType.none())
        options.set_write_buffer_size(memory // 12)
        options.set_max_write_buffer_number(3)
        options.set_max_background_jobs(2)
        options.set_optimize_filters_for_hits(True)
        options.create_if_missing(True)
        self._rocks = rocks
        self._store = rocks.Rdict(str(work / "rocks"), options)
        writes = rocks.WriteOptions()
        writes.disable_wal = True
        self._store.set_write_options(writes)
        self._threads = ThreadPoolExecutor(16)

    def get(self, names: list[bytes]) -> Sequence[bytes]:
        parts = [names[i : i + 256] for i in range(0, len(names), 256)]
        return [one for part in self._threads.map(self._store.get, parts) for one in part]

    def put(self, pairs: list[tuple[bytes, bytes]]) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for name, value in pairs:
            batch.put(name, value)
        self._store.write(batch)


class Lmdb(Stored):
    """LMDB without syncs, its map read at random, keys in order."""

    def __init__(self, work: Path, dim: int, memory: int) -> None:
        import lmdb

        super().__init__(dim)
        self._store = lmdb.open(
            str(work / "lmdb"),
            map_size=TABLE * 8,
            sync=False,
            metasync=False,
            writemap=True,
            map_async=True,
            readahead=False,
        )

    def get(self, names: list[bytes]) -> Sequence[bytes]:
        with self._store.begin() as turn, turn.cursor() as cursor:
            found = dict(cursor.getmulti(sorted(names)))
        return [found[name] for name in names]

    def put(self, pairs: list[tuple[bytes, bytes]]) -> None:
        with self._store.begin(write=True) as turn, turn.cursor() as cursor:
            cursor.putmulti(sorted(pairs))


CONTESTANTS: dict[str, Callable[[Path, int, int], Contestant]] = {
    "ours": Ours,
    "ours, ahead": Ahead,
    "in memory": Ours,
    "rocksdict": Rocks,
    "lmdb": Lmdb,
}


def _bytes(key: int) -> bytes:
    return key.to_bytes(8, "big")
