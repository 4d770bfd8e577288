"""A contestant's process, in a control group that caps its memory, and what it says."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.beyond.turns import GROUPS, can_cap
from bench.ssd.contestants import CONTESTANTS, Contestant
from bench.ssd.steps import SHARE, TABLE, Steps, count_of, row_bytes

BESIDE = TABLE // SHARE * 7 // 24  # bytes of the cap that are left to batches and the heap
FILL = 4096
MEMORY = "in memory"  # the contestant without a cap


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
    if group != "-" and name != MEMORY:
        folder = Path(group)
        # Not the pages of files that it has read: those of libraries may be another's.
        told = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        base = int(told["rss"])
        (folder / "memory.limit_in_bytes").write_text(str(base + TABLE // SHARE))
    one: Contestant = CONTESTANTS[name](work, dim, 0 if name == MEMORY else memory)
    begin = time.perf_counter()
    for at in range(0, count_of(dim), FILL):
        one.fill(np.arange(at, min(at + FILL, count_of(dim))))
    _say({"filled": time.perf_counter() - begin})
    number = 0
    for line in sys.stdin:
        asked = json.loads(line)
        before, counted = _written(), one.told
        seconds, rows = [], []
        end = time.perf_counter() + asked["seconds"]
        most = asked.get("rows", float("inf"))
        keys, grads = steps.step(number)
        while not rows or (time.perf_counter() < end and sum(rows) < most):
            coming = steps.step(number + 1)
            begin = time.perf_counter()
            one.step(keys, grads, coming[0])
            seconds.append(time.perf_counter() - begin)
            rows.append(len(keys))
            number, (keys, grads) = number + 1, coming
        os.sync()
        now = one.told
        _say(
            {
                "steps": number,
                "seconds": sum(seconds),
                "rows": sum(rows),
                "p50": sorted(seconds)[len(seconds) // 2],
                "p99": sorted(seconds)[len(seconds) * 99 // 100],
                "updated": sum(rows) * row_bytes(dim),
                "written": _written() - before,
                "space": _space(work) + now["disk_bytes"],
                "promoted": now.get("promoted", 0) - counted.get("promoted", 0),
                "tidied": now.get("tidied", 0) - counted.get("tidied", 0),
                "some": one.rows(steps.some).tolist(),
            }
        )
    return 0


class Process:
    """A contestant in its group, or in none where pages may lie in memory."""

    def __init__(self, name: str, work: Path, dim: int, *, capped: bool = True) -> None:
        told = name.replace(" ", "-").replace(",", "")
        self._work = work / f"ssd-{told}-{dim}"
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        self._group = GROUPS / f"ssd-{os.getpid()}-{dim}-{told}-{id(self)}"
        join, group = "", "-"
        if capped and can_cap():
            self._group.mkdir()
            join, group = f"echo $$ > {self._group}/cgroup.procs; ", str(self._group)
        command = f"{join}exec '{sys.executable}' -m bench.ssd '{self._work}' --child '{name}'"
        self._process = subprocess.Popen(
            ["sh", "-c", f"{command} --dims {dim} --group '{group}'"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Else what each of a store's threads has freed would be kept for that thread alone.
            env={**os.environ, "MALLOC_ARENA_MAX": "2"},
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        """What it says next, or {"failed": how it ended}."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"failed": f"ended with {self._process.wait()}"}

    def run(self, seconds: float, rows: int | None = None) -> dict[str, Any]:
        """A turn of so many seconds, or until so many rows were updated; what it says of it."""
        assert self._process.stdin is not None
        asked = {"seconds": seconds} | ({"rows": rows} if rows else {})
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self.hear()

    def close(self) -> None:
        """End it, and have its files go."""
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


def _written() -> int:
    """Bytes that this process has had written to a disk, pages that it made dirty among them."""
    lines = Path("/proc/self/io").read_text().split("\n")
    return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))


def _space(work: Path) -> int:
    return sum(one.stat().st_blocks * 512 for one in work.rglob("*") if one.is_file())


def _say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)
