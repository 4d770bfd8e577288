"""Tables beyond memory beside key-value stores: an eighth of the table in memory.

Each contestant is a process in a control group of its own, whose cap is that eighth and what its
process had before, page cache included. All do the same steps in turns: distinct keys of a Zipf
law, their rows, Adagrad, the rows written. Rows of each are compared with what NumPy makes of them.

    python -m bench.ssd WORK [--dims 16 64] [--rounds 6] [--within SECONDS] [--json FILE]
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.beyond.turns import GROUPS, can_cap
from bench.pages import RESULTS, machine, versions, write

TABLE = 256 << 20  # bytes of weights and states
SHARE, ZIPF, BATCH, RATE = 8, 1.05, 8192, 0.1
BESIDE = 8 << 20  # bytes of the cap that are left to batches and pages
FILL = 4096
Floats = NDArray[np.float32]
Keys = NDArray[np.int64]


class Contestant(Protocol):
    """What holds rows of weights and states [2, dim]."""

    def fill(self, keys: Keys) -> None:
        """Rows of zeros that have seen a gradient of ones, keys ascending."""

    def step(self, keys: Keys, grads: Floats) -> None:
        """Read these rows, move them by Adagrad, and have them written."""

    def rows(self, keys: Keys) -> Floats:
        """Weights [n, dim]."""

    @property
    def unnamed(self) -> int:
        """Bytes of files that no folder names."""


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

    def step(self, keys: Keys, grads: Floats) -> None:
        self._table.pull(keys)
        self._table.push(keys, grads)

    def rows(self, keys: Keys) -> Floats:
        return self._table.pull(keys, read_only=True)

    @property
    def unnamed(self) -> int:
        return self._table.counters["disk_bytes"]


class Stored:
    """Rows as values of a store, their state behind them."""

    def __init__(self, dim: int) -> None:
        self._dim = dim

    def fill(self, keys: Keys) -> None:
        one = np.zeros((2, self._dim), np.float32)
        adagrad(one[None], np.ones((1, self._dim), np.float32))
        value = one.tobytes()
        self.put([(_bytes(key), value) for key in keys.tolist()])

    def step(self, keys: Keys, grads: Floats) -> None:
        names = [_bytes(key) for key in keys.tolist()]
        rows = np.frombuffer(b"".join(self.get(names)), np.float32)
        rows = rows.reshape(len(keys), 2, self._dim).copy()
        adagrad(rows, grads)
        self.put([(name, row.tobytes()) for name, row in zip(names, rows, strict=True)])

    def rows(self, keys: Keys) -> Floats:
        found = b"".join(self.get([_bytes(key) for key in keys.tolist()]))
        return np.frombuffer(found, np.float32).reshape(len(keys), 2, self._dim)[:, 0]

    @property
    def unnamed(self) -> int:
        return 0

    def get(self, names: list[bytes]) -> Sequence[bytes]:
        raise NotImplementedError

    def put(self, pairs: list[tuple[bytes, bytes]]) -> None:
        raise NotImplementedError


class Rocks(Stored):
    """RocksDB as embedding stores tune it: no compression, filters, no log, many reads at once."""

    def __init__(self, work: Path, dim: int, memory: int) -> None:
        import rocksdict as rocks

        super().__init__(dim)
        options, blocks = rocks.Options(raw_mode=True), rocks.BlockBasedOptions()
        blocks.set_block_cache(rocks.Cache(memory // 2))
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
    "in memory": Ours,
    "rocksdict": Rocks,
    "lmdb": Lmdb,
}


def adagrad(rows: Floats, grads: Floats) -> None:
    """A step of rows [n, 2, dim], in place."""
    rows[:, 1] += grads * grads
    rows[:, 0] -= RATE * grads / (np.sqrt(rows[:, 1]) + 1e-10)


def _bytes(key: int) -> bytes:
    return key.to_bytes(8, "big")


def count_of(dim: int) -> int:
    """Rows of a table of so many bytes."""
    return TABLE // (2 * 4 * dim)


class Steps:
    """Keys and gradients, the same for all: keys in no order, some far oftener than others."""

    def __init__(self, dim: int) -> None:
        self._dim, self._count = dim, count_of(dim)
        shares = 1 / np.arange(1, self._count + 1) ** ZIPF
        self._sum = np.cumsum(shares / shares.sum())
        self._names = np.random.default_rng(1).permutation(self._count).astype(np.int64)

    @property
    def some(self) -> Keys:
        """To be compared: some of all, and those that come oftenest."""
        return np.concatenate([self._names[:4], self._names[4 :: self._count // 16]])

    def after(self, count: int) -> Floats:
        """Rows of `some` after so many steps, and after having been filled."""
        place = {key: i for i, key in enumerate(self.some.tolist())}
        rows = np.zeros((len(place), 2, self._dim), np.float32)
        adagrad(rows, np.ones((len(place), self._dim), np.float32))
        for number in range(count):
            keys, grads = self.step(number)
            for at in np.flatnonzero(np.isin(keys, self.some)):
                i = place[int(keys[at])]
                adagrad(rows[i : i + 1], grads[at : at + 1])
        return rows[:, 0]

    def step(self, number: int) -> tuple[Keys, Floats]:
        draw = np.random.default_rng(number + 2)
        places = np.searchsorted(self._sum, draw.random(BATCH))
        keys = np.unique(self._names[np.minimum(places, self._count - 1)])
        return keys, draw.standard_normal((len(keys), self._dim)).astype(np.float32)


def child(name: str, work: Path, dim: int, group: str) -> int:
    """A contestant's process: takes steps when told how many, and says what they took."""
    import ps  # noqa: F401 (all of it that is counted as the process's own)

    if name == "rocksdict":
        import rocksdict  # noqa: F401
    elif name == "lmdb":
        import lmdb  # noqa: F401
    steps = Steps(dim)
    steps.step(0)
    memory = TABLE // SHARE - BESIDE
    if group != "-" and name != "in memory":
        folder = Path(group)
        base = int((folder / "memory.usage_in_bytes").read_text())
        (folder / "memory.limit_in_bytes").write_text(str(base + TABLE // SHARE))
    one: Contestant = CONTESTANTS[name](work, dim, 0 if name == "in memory" else memory)
    begin = time.perf_counter()
    for at in range(0, count_of(dim), FILL):
        one.fill(np.arange(at, min(at + FILL, count_of(dim))))
    _say({"filled": time.perf_counter() - begin})
    number = 0
    for line in sys.stdin:
        told: dict[str, Any] = {"seconds": [], "keys": [], "updated": 0}
        before, end = _written(), time.perf_counter() + json.loads(line)["seconds"]
        while time.perf_counter() < end:
            keys, grads = steps.step(number)
            begin = time.perf_counter()
            one.step(keys, grads)
            told["seconds"].append(time.perf_counter() - begin)
            told["keys"].append(len(keys))
            number += 1
        os.sync()
        told["written"] = _written() - before
        told["space"] = _space(work) + one.unnamed
        told["steps"] = number
        told["rows"] = one.rows(steps.some).tolist()
        _say(told)
    return 0


def _written() -> int:
    """Bytes that this process has had written to a disk, pages that it made dirty among them."""
    lines = Path("/proc/self/io").read_text().split("\n")
    return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))


def _space(work: Path) -> int:
    return sum(one.stat().st_blocks * 512 for one in work.rglob("*") if one.is_file())


def _say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


class Process:
    """A contestant in its group."""

    def __init__(self, name: str, work: Path, dim: int) -> None:
        self._work = work / f"ssd-{name.replace(' ', '-')}-{dim}"
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        self._group = GROUPS / f"ssd-{os.getpid()}-{dim}-{name.replace(' ', '-')}"
        join, group = "", "-"
        if can_cap():
            self._group.mkdir()
            join, group = f"echo $$ > {self._group}/cgroup.procs; ", str(self._group)
        command = f"{join}exec '{sys.executable}' -m bench.ssd '{self._work}' --child '{name}'"
        self._process = subprocess.Popen(
            ["sh", "-c", f"{command} --dims {dim} --group '{group}'"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"failed": f"ended with {self._process.wait()}"}

    def run(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"seconds": seconds}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.hear()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._work, ignore_errors=True)
        if self._group.exists():
            for _ in range(50):
                try:
                    self._group.rmdir()
                    return
                except OSError:
                    time.sleep(0.02)


def measure(work: Path, dim: int, rounds: int, seconds: float, until: float) -> dict[str, Any]:
    """Turns of all contestants with rows of a width."""
    found: dict[str, Any] = {"rows": count_of(dim), "turns": {}, "filled": {}}
    field = {}
    try:
        for name in CONTESTANTS:  # one after the other: filling is no turn
            field[name] = Process(name, work, dim)
            found["filled"][name] = field[name].hear()
            field[name].run(seconds)  # until memory is as it stays
        for _ in range(rounds):
            for name, one in field.items():
                found["turns"].setdefault(name, []).append(one.run(seconds))
            if time.monotonic() > until:
                break
    finally:
        for one in field.values():
            one.close()
    steps = Steps(dim)
    for turns in found["turns"].values():
        last = turns[-1]
        if "rows" in last:
            rows = np.array(last.pop("rows"), np.float32)
            last["equal"] = bool(np.allclose(rows, steps.after(last["steps"]), 1e-4, 1e-5))
        for turn in turns:
            turn.pop("rows", None)
    return found


def rate(turns: list[dict[str, Any]]) -> float:
    """Rows a second, of the median turn; zero where one failed."""
    each = [sum(t["keys"]) / sum(t["seconds"]) if "keys" in t else 0.0 for t in turns]
    return statistics.median(each)


def table(result: dict[str, Any]) -> str:
    """As Markdown."""
    lines = ["| dim | rows | " + " | ".join(f"{name}, rows/s" for name in CONTESTANTS)]
    lines[0] += (
        " | over the better store | of in memory | written / updated | space / live | rows |"
    )
    lines.append("| --- " * (lines[0].count("|") - 1) + "|")
    for dim, one in result["dims"].items():
        rates = {name: rate(turns) for name, turns in one["turns"].items()}
        ours = one["turns"]["ours"]
        row = 2 * 4 * int(dim)
        if "keys" not in ours[-1]:
            lines.append(f"| {dim} | {one['rows']:,} | {ours[-1]}")
            continue
        updated = sum(sum(turn["keys"]) for turn in ours) * row
        best = max(rates["rocksdict"], rates["lmdb"]) or float("nan")
        wrong = [name for name, turns in one["turns"].items() if not turns[-1].get("equal")]
        told = f"not of {', '.join(wrong)}" if wrong else "equal"
        lines.append(
            f"| {dim} | {one['rows']:,} | "
            + " | ".join(f"{rates[name]:,.0f}" for name in CONTESTANTS)
            + f" | **{rates['ours'] / best:.1f} x** | {rates['ours'] / rates['in memory']:.0%}"
            + f" | {sum(turn['written'] for turn in ours) / updated:.2f}"
            + f" | {ours[-1]['space'] / (one['rows'] * row):.2f} | {told} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds for each width")
    parser.add_argument("--json", type=Path, default=RESULTS / "ssd.json")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--group", default="-", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.work, options.dims[0], options.group)
    result: dict[str, Any] = {
        "benchmark": "ssd",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("numpy", "rocksdict", "lmdb"),
        "capped": can_cap(),
        "table_bytes": TABLE,
        "share": SHARE,
        "zipf": ZIPF,
        "dims": {},
    }
    for dim in options.dims:
        until = time.monotonic() + options.within
        result["dims"][dim] = measure(options.work, dim, options.rounds, options.seconds, until)
        write(options.json, json.dumps(result) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
