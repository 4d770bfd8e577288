"""Contestants as processes in control groups, and what the disk gives meanwhile."""

import ctypes
import json
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from bench.beyond.contestants import files
from workers.offload.experts.layout import view_of
from workers.offload.experts.packed import PackedExperts
from workers.offload.slots.memory import fixed
from workers.offload.slots.readers import Read, Readers

THREADS = 1  # that compute, in each contestant: those of torch spin, and reading needs a core
GROUPS = Path("/sys/fs/cgroup/memory")


def can_cap() -> bool:
    """Whether memory can be capped: groups of version 1 that may be made."""
    return os.access(GROUPS, os.W_OK) and (GROUPS / "memory.limit_in_bytes").exists()


class Contestant:
    """A process that runs tokens when told; its files are evicted before it begins.

    Args:
        name: which, of `contestants.NAMES`.
        work: the folder of all files.
        memory: bytes that its experts may take.
        batch: tokens of a forward.
        first: token of the trace, with which it begins.
        unlimited: its group has no limit.

    Attributes:
        said: when it was ready.
        failed: what it ended of; nothing while it runs.
    """

    def __init__(
        self,
        name: str,
        work: Path,
        memory: int,
        batch: int = 1,
        first: int = 0,
        unlimited: bool = False,
    ) -> None:
        self.said: dict[str, Any] = {}
        self.failed = ""
        ending = "-unlimited" if unlimited else ""
        self._group = GROUPS / f"beyond-{os.getpid()}-{id(self)}{ending}" if can_cap() else None
        at = files(work)
        path = at.get({"resident": "torch mmap"}.get(name, name), at["heterps"])
        self.resident_before = evict(path)
        join = ""
        if self._group is not None:
            self._group.mkdir()
            join = f"echo $$ > {self._group}/cgroup.procs; "
        argv = [str(work), name, str(memory), str(batch), str(first), str(self._group or "-")]
        quoted = " ".join(f"'{one}'" for one in (sys.executable, "-W", "ignore", "-m"))
        told = " ".join(f"'{one}'" for one in argv)
        self._errors = TemporaryFile()  # noqa: SIM115 (closed with this)
        self._process = subprocess.Popen(
            ["sh", "-c", f"{join}exec {quoted} bench.beyond.contestants {told}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
            text=True,
        )

    def ready(self) -> None:
        """Wait until it is, or has failed."""
        self.said = self._hear()

    def run(self, forwards: int) -> dict[str, Any]:
        """So many forwards more; what it told of them, or {"failed": why}."""
        if self.failed:
            return {"failed": self.failed}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"forwards": forwards}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it ended of is seen below
        return self._hear()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._errors.close()
        if self._group is not None:
            for _ in range(50):
                try:
                    self._group.rmdir()
                    return
                except OSError:
                    time.sleep(0.02)

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self.failed = self._ended()
        return {"failed": self.failed}

    def _ended(self) -> str:
        code = self._process.wait()
        if self._group is not None:
            control = (self._group / "memory.oom_control").read_text().split()
            if control[control.index("oom_kill") + 1] != "0":
                return "killed for memory over its cap"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with {code}: {lines[-1] if lines else 'without a word'}"


def enter(
    names: Sequence[str],
    work: Path,
    memory: int,
    batch: int = 1,
    first: int = 0,
    later: Mapping[str, int] | None = None,
) -> dict[str, Contestant]:
    """Contestants that are ready or have failed; the one that reads all into memory leaves no pages
    behind. `later` are those that begin with another token than `first`.
    """
    field = {}
    for name in names:
        field[name] = Contestant(name, work, memory, batch, (later or {}).get(name, first))
        if name == "resident":
            field[name].ready()
    for name, one in field.items():
        if name != "resident":
            one.ready()
    return field


def evict(path: Path) -> int:
    """Have a file's pages leave the page cache; how many bytes of it are there all the same."""
    every = [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
    return sum(_evict(one) for one in every)


def _evict(path: Path) -> int:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(file).st_size
        with mmap.mmap(file, size, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as mapped:
            return _resident(mapped, size)
    finally:
        os.close(file)


def _resident(mapped: mmap.mmap, size: int) -> int:
    import numpy as np

    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    done = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found)
    assert done == 0
    return sum(one & 1 for one in bytes(found)) * mmap.PAGESIZE


class Disk:
    """What the reader gets of the file of experts: bytes a second."""

    def __init__(self, work: Path) -> None:
        self._packed = PackedExperts(files(work)["heterps"])
        self._layers, self._readers = self._packed.layers, Readers(8)
        self._size = max(layer.extent for layer in self._layers)
        self._memory = fixed(8 * self._size)[0].view(8, self._size)
        self._draw = random.Random(0)

    def speed(self, seconds: float = 0.3, at_once: int = 4) -> float:
        """Of experts at random, so many asked for at once."""
        begin, size = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            reads = []
            for slot in range(at_once):
                layer = self._draw.randrange(len(self._layers))
                expert = self._draw.randrange(self._layers[layer].experts)
                read = Read(self._packed, slot, layer, expert, [view_of(self._memory[slot])], False)
                self._readers.begin(read)
                reads.append(read)
                size += self._size
            for read in reads:
                self._readers.wait(read)
        return size / (time.perf_counter() - begin)
