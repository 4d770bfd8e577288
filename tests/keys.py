"""Keys that fall where a test wants them."""

import numpy as np
from numpy.typing import NDArray


def keys_of_one_subtable(count: int) -> NDArray[np.uint64]:
    """Keys whose hashes, of ps/engine/table/hash.h, differ in their upper 48 bits alone."""
    spread = np.uint64(0x9E3779B97F4A7C15)  # odd, so that none is another's; else indices crowd
    x = np.arange(count, dtype=np.uint64) * spread << np.uint64(16)
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        x = x ^ (x >> np.uint64(shift)) ^ (x >> np.uint64(2 * shift))
        x = x * np.uint64(pow(factor, -1, 1 << 64))
    return x - np.uint64(0x9E3779B97F4A7C15)
