"""A clock that stands still while other processes keep a thread off the processor."""

import os
import threading
import time


class QuietClock:
    """Seconds as they would pass on a machine with nothing else to do.

    Linux says how long a thread that could run was kept waiting; elsewhere it is wall time. What a
    thread waits for by itself counts.

    Args:
        thread: native id of the thread of this process that is timed.
    """

    def __init__(self, thread: int | None = None) -> None:
        own = threading.get_native_id() if thread is None else thread
        try:
            self._file = os.open(f"/proc/self/task/{own}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter() - self._kept_waiting()

    def _kept_waiting(self) -> float:
        if self._file < 0:
            return 0.0
        try:
            _, waited, _ = os.pread(self._file, 64, 0).split()
        except (OSError, ValueError):  # the thread is gone
            return 0.0
        return int(waited) / 1e9

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
