"""Training with experts out of memory on a disk as slow as wanted: what of it is waited for.

    python -m bench.beyond.slow WORK [--megabytes 800] [--batch 256] [--steps 6]

Reads and writes share so many MB a second, however many are under way: caches of the host cannot
tell, which they do otherwise. `--megabytes 0` is the disk as it is. One thread computes, in memory
and out of it in turns; a line has medians of the steps after the first two, in which both make
their states: seconds, what was waited for the disk, MB, and the share of max(seconds in memory,
bytes / bandwidth).
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.optim import Adam

from bench.beyond import training
from bench.beyond.contestants import Big
from bench.beyond.turns import THREADS
from heterps import offload_training
from workers.offload.engine import _reads
from workers.offload.experts.trained import TrainedExperts

_PART = 2 << 20  # bytes, as reads and writes are made


@contextmanager
def throttled(rate: float) -> Iterator[None]:
    """Meanwhile experts that are trained are read and written at so many bytes a second."""
    lock, free = Lock(), 0.0

    def wait(size: int) -> None:
        nonlocal free
        with lock:
            free = end = max(free, time.perf_counter()) + min(_PART, size) / rate
        time.sleep(max(0.0, end - time.perf_counter()))

    own_read, own_write = TrainedExperts.native_read, TrainedExperts.native_write

    def native_read(
        self: TrainedExperts, layer: int, first: int, into: list[memoryview], *given: Any
    ) -> _reads.Transfer:
        def before(i: int, at: int) -> None:
            wait(len(into[i]) - at)

        return own_read(self, layer, first, into, *given, before)

    def native_write(
        self: TrainedExperts, layer: int, expert: int, extent: memoryview
    ) -> _reads.Transfer:
        return own_write(self, layer, expert, extent, lambda _, at: wait(len(extent) - at))

    kind: Any = TrainedExperts
    kind.native_read, kind.native_write = native_read, native_write
    try:
        yield
    finally:
        kind.native_read, kind.native_write = own_read, own_write


def measure(work: Path, rate: float, batch: int, steps: int) -> dict[str, Any]:
    """Medians of so many steps, and whether weights are the same after them."""
    torch.manual_seed(0)
    resident = Big(layers=training.LAYERS)
    model = copy.deepcopy(resident)
    theirs, ours = Adam(resident.parameters()), Adam(model.parameters())
    rows = []
    with tempfile.TemporaryDirectory(dir=work, prefix="slow-") as folder:
        path, saved = Path(folder) / "experts", Path(folder) / "saved"
        with offload_training(model, ours, training.MEMORY, path=path) as handle:
            for number in range(steps + 2):
                taken = training.step(resident, theirs, number, batch)
                before, written = handle.stats, handle.bytes_written
                seconds = training.step(model, ours, number, batch)
                since = handle.stats - before
                moved = since.bytes_read / 1e6, (handle.bytes_written - written) / 1e6
                rows.append((taken, seconds, since.waited, *moved))
            print(handle.line(), file=sys.stderr)
            handle.save(saved)
        equal = training.equal(saved, resident)
    names = ("in_memory", "seconds", "waited", "read", "written")
    columns = zip(names, zip(*rows[2:], strict=True), strict=True)
    found = {name: statistics.median(some) for name, some in columns}
    moving = (found["read"] + found["written"]) * 1e6 / rate if rate else 0.0
    found["of_bound"] = max(found["in_memory"], moving) / found["seconds"]
    return {name: round(one, 3) for name, one in found.items()} | {"equal": equal}


def main() -> int:
    """See above; 1 where weights were not the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--megabytes", type=float, default=800.0, help="a second; 0: no limit")
    parser.add_argument("--batch", type=int, default=training.BATCH)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    rate = options.megabytes * 1e6
    with throttled(rate) if rate else nullcontext():
        found = measure(options.work, rate, options.batch, options.steps)
    print(json.dumps(found))
    return not found["equal"]


if __name__ == "__main__":
    sys.exit(main())
