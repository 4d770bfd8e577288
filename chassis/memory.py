"""Memory of processes that send and take large messages."""

import ctypes
import os

# glibc/malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_KEPT = 512 << 20


def keep_buffers() -> bool:
    """Have malloc keep large blocks that were freed, instead of returning them to the system.

    A message of megabytes otherwise costs more in page faults than in copying: on loopback,
    pulls of 5 MB took half the time with it. At most half a gigabyte is kept, and all threads
    share it: `release_buffers` could not return the end of arenas beyond the first. Whoever has
    set MALLOC_TRIM_THRESHOLD_ or another of glibc's variables keeps what they have set.

    Returns:
        Whether it was done; only glibc can.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    done = (
        mallopt(_MMAP_THRESHOLD, 32 << 20),  # the most it takes
        mallopt(_TRIM_THRESHOLD, _KEPT),
        mallopt(_TOP_PAD, 16 << 20),
        mallopt(_ARENA_MAX, 1),
    )
    return all(done)


def release_buffers() -> None:
    """Return to the system what malloc keeps and nothing uses."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return
