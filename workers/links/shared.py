"""Bulk bytes of a line between two workers of one host: copied once, into memory that both have.

Through a Unix socket they are copied three times, into pages that are new each time: 0.4 ms of
processor a MB against 0.07. The sender owns the memory, a file without a name; the taker maps it
and gives each slot back when nothing refers to its bytes any more. It is sealed against shrinking,
since to read beyond the end of a mapped file kills the reader.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.codec import Buffer

LEAST_BYTES = 64 << 10  # of a payload; smaller ones go along with their message
MOST_BYTES = 512 << 20  # of a line
_MOST_SLOTS = 64  # whoever does not take what is sent holds no more
_STEPS = 8  # sizes of slots between two powers of two


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of the memory: its number, and where it lies, in bytes."""

    number: int
    first: int
    size: int


class Arena:
    """The sender's side: memory that grows by a slot whenever none is free.

    Raises:
        OSError: there is no such memory on this system.
    """

    def __init__(self) -> None:
        create: Callable[[str, int], int] | None = getattr(os, "memfd_create", None)
        if create is None:
            raise OSError("memory without a name is a feature of Linux")
        self.file = create("heterps-stage", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._lock = threading.Lock()
        self._slots: list[Slot] = []
        self._memory: list[NDArray[np.uint8]] = []
        self._free: set[int] = set()
        self._size = 0

    def put(self, buffers: Sequence[Buffer], size: int) -> Slot | None:
        """Copy buffers of `size` bytes in all; None: there is no room."""
        with self._lock:
            fits = [number for number in self._free if self._slots[number].size >= size]
            number = min(fits, key=lambda one: self._slots[one].size) if fits else self._grow(size)
            if number is None:
                return None
            self._free.discard(number)
            end = 0
            for buffer in buffers:
                first, end = end, end + len(buffer)
                # By NumPy, which lets other threads go on.
                np.copyto(self._memory[number][first:end], np.frombuffer(buffer, np.uint8))
            return self._slots[number]

    def give_back(self, number: int) -> None:
        """The other side has no more use for what is in a slot."""
        with self._lock:
            if number < len(self._slots):
                self._free.add(number)

    def close(self) -> None:
        """Nothing more is put; what the other side has stays there."""
        with self._lock:
            if self.file >= 0:
                os.close(self.file)
                self.file = -1

    def _grow(self, size: int) -> int | None:
        step = max(mmap.ALLOCATIONGRANULARITY, (1 << size.bit_length() - 1) // _STEPS)
        size += -size % step
        if self.file < 0 or len(self._slots) >= _MOST_SLOTS or self._size + size > MOST_BYTES:
            return None
        try:
            os.posix_fallocate(self.file, self._size, size)  # too little fails here, not by SIGBUS
            memory = mmap.mmap(self.file, size, offset=self._size)
        except OSError:
            return None
        self._memory.append(np.frombuffer(memory, np.uint8))
        self._slots.append(Slot(len(self._slots), self._size, size))
        self._size += size
        return len(self._slots) - 1


class Mapped:
    """The taker's side of an `Arena`.

    Args:
        file: its descriptor, which is closed with this.
        give_back: told of each slot of which nothing is referred to any more, by any thread.

    Raises:
        OSError: it could shrink, or is no such memory.
    """

    def __init__(self, file: int, give_back: Callable[[int], None]) -> None:
        self._file = file
        self._give_back = give_back
        self._maps: dict[int, mmap.mmap] = {}
        try:
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("the memory of a line is not sealed against shrinking")
        except OSError:
            os.close(file)
            raise

    def view(self, slot: Slot, size: int) -> memoryview:
        """The first bytes of a slot, which is given back once nothing refers to them.

        Raises:
            ValueError: there is no such slot.
        """
        memory = self._maps.get(slot.number)
        if memory is None:
            if slot.number >= _MOST_SLOTS or slot.first + slot.size > MOST_BYTES:
                raise ValueError(f"{slot} of shared memory; expected at most {MOST_BYTES} bytes")
            try:
                memory = mmap.mmap(self._file, slot.size, offset=slot.first)
            except OSError as error:
                raise ValueError(f"{slot} of shared memory: {error}") from None
            self._maps[slot.number] = memory
        if not 0 < size <= len(memory):
            raise ValueError(f"{size} bytes in {slot} of shared memory")
        whole = np.frombuffer(memory, np.uint8, size)
        weakref.finalize(whole, self._give_back, slot.number).atexit = False
        return whole.data

    def close(self) -> None:
        """Map nothing more; what is referred to stays."""
        os.close(self._file)
        self._maps.clear()
