"""Memory that the kernel neither takes away nor gives piece by piece."""

import ctypes
import mmap

import torch
from torch import Tensor

_HUGE = 2 << 20  # bytes of a huge page: a direct read into one has fewer pieces


def fixed(size: int) -> tuple[Tensor, bool]:
    """Uint8 [size] at a multiple of a page, all there at once, and whether it is locked.

    It is anonymous, so that it goes nowhere on a host without swap; locked, where the process may
    (`ulimit -l`), it does not with swap either.
    """
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:size]
    locked = lock(tensor)
    if not locked:
        tensor.zero_()
    return tensor, locked


def lock(tensor: Tensor) -> bool:
    """Lock a tensor's pages in memory, until it is freed; whether that is allowed."""
    library = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(tensor.data_ptr())
    return bool(library.mlock(address, ctypes.c_size_t(tensor.nbytes)) == 0)
