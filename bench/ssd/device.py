"""What the disk gives to reads at random places, past the page cache."""

import mmap
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

PAGE, AT_ONCE = 4096, 32


class Device:
    """Reads of pages of a file of its own, many at once, by a process a core.

    One process would measure Python's lock.
    """

    def __init__(self, work: Path, size: int) -> None:
        self._path, self._size = work / "device", size
        with self._path.open("wb") as stream:
            for _ in range(0, size, 1 << 20):
                stream.write(os.urandom(1 << 20))
            os.fsync(stream.fileno())
        self._cores = os.cpu_count() or 1
        context = multiprocessing.get_context("forkserver")
        self._processes = ProcessPoolExecutor(self._cores, context)
        list(self._processes.map(time.sleep, [0.2] * self._cores))  # until all are there

    def reads(self, seconds: float) -> float:
        """Of a page, a second."""
        end = time.time() + seconds
        asked = [
            self._processes.submit(_reads, self._path, self._size, end, core)
            for core in range(self._cores)
        ]
        return sum(one.result() for one in asked) / seconds

    def close(self) -> None:
        """End the processes, and have the file go."""
        self._processes.shutdown()
        self._path.unlink()


def _reads(path: Path, size: int, end: float, core: int) -> int:
    """How many are made until then by threads of this process."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(seed: int) -> int:
        draw, page, done = random.Random(seed), mmap.mmap(-1, PAGE), 0
        while time.time() < end:
            for _ in range(16):
                done += os.preadv(file, [page], draw.randrange(size // PAGE) * PAGE) // PAGE
        return done

    try:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return sum(threads.map(read, range(core * AT_ONCE, (core + 1) * AT_ONCE)))
    finally:
        os.close(file)
