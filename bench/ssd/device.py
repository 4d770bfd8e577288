"""What the disk gives to reads at random places, past the page cache."""

import mmap
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

PAGE, AT_ONCE = 4096, 32


def random_reads(work: Path, size: int, seconds: float) -> float:
    """Reads of a page a second, many at once, of a file of `size` bytes."""
    path = work / "device"
    with path.open("wb") as stream:
        for _ in range(0, size, 1 << 20):
            stream.write(os.urandom(1 << 20))
        os.fsync(stream.fileno())
    cores = os.cpu_count() or 1
    try:
        # A process a core, else Python's lock would be what is measured.
        with ProcessPoolExecutor(cores, multiprocessing.get_context("forkserver")) as processes:
            list(processes.map(time.sleep, [0.2] * cores))  # until all are there
            end = time.time() + seconds
            asked = [processes.submit(_reads, path, size, end, core) for core in range(cores)]
            return sum(one.result() for one in asked) / seconds
    finally:
        path.unlink()


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
