"""Keys that lie together in one sixty-fourth of a table: few rows fill much of its disk file."""

import numpy as np
from numpy.typing import NDArray


def crowded(count: int) -> NDArray[np.int64]:
    """The lowest keys of the first sub-table."""
    x = np.arange(80 * count + 4096, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    found = np.flatnonzero(x >> np.uint64(10) & np.uint64(63) == 0)[:count]
    assert len(found) == count
    return found
