"""What the disk gives to reads at random places, past the page cache."""

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PAGE, AT_ONCE = 4096, 32


def random_reads(work: Path, size: int, seconds: float) -> float:
    """Reads of a page a second, many at once, of a file of `size` bytes."""
    path = work / "device"
    with path.open("wb") as stream:
        for _ in range(0, size, 1 << 20):
            stream.write(os.urandom(1 << 20))
        os.fsync(stream.fileno())
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    end = time.perf_counter() + seconds

    def read(seed: int) -> int:
        draw, page, done = random.Random(seed), mmap.mmap(-1, PAGE), 0
        while time.perf_counter() < end:
            done += os.preadv(file, [page], draw.randrange(size // PAGE) * PAGE) // PAGE
        return done

    try:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return sum(threads.map(read, range(AT_ONCE))) / seconds
    finally:
        os.close(file)
        path.unlink()
