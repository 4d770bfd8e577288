"""Encoded rows as a file that every process of a host maps: the arrays of a `Batch`, one by one."""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from workers.data.columns.arrays import Batch


def store(path: Path, batches: Iterable[Batch], rows: int, like: Batch) -> int:
    """Write the first `rows` of these batches, side by side; how many there were in all.

    Args:
        like: any batch, for types and widths.

    Raises:
        OSError: there is no room.
    """
    arrays = [*like.arrays.values()]
    widths = [array.dtype.itemsize * int(np.prod(array.shape[1:])) for array in arrays]
    starts = np.cumsum([0, *(width * rows for width in widths)]).tolist()
    done = 0
    with path.open("wb") as file:
        if rows:
            os.posix_fallocate(file.fileno(), 0, starts[-1])
        for batch in batches:
            kept = batch.slice(0, rows - min(done, rows))
            for array, start, width in zip(kept.arrays.values(), starts, widths, strict=False):
                file.seek(start + min(done, rows) * width)
                file.write(np.ascontiguousarray(array).data if array.size else b"")
            done += len(batch)
    path.chmod(0o600)
    return done


def mapped(path: Path, like: Batch) -> Batch:
    """The rows of a file, read-only and in memory that all who map it share.

    They stay readable when the file is removed.

    Raises:
        FileNotFoundError: it is not there.
    """
    row_bytes = sum(a.dtype.itemsize * int(np.prod(a.shape[1:])) for a in like.arrays.values())
    with path.open("rb") as file:
        rows = os.fstat(file.fileno()).st_size // row_bytes
        if not rows:
            return like.slice(0, 0)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found, start = {}, 0
    for name, array in like.arrays.items():
        shape = (rows, *array.shape[1:])
        count = int(np.prod(shape))
        found[name] = np.frombuffer(memory, array.dtype, count, start).reshape(shape)
        start += count * array.dtype.itemsize
    return Batch(found)
