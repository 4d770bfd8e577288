"""Processes by their ids."""

import os
import signal
from pathlib import Path

from tests.waiting import wait_until


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has: another may answer a while yet."""
    os.kill(pid, signal.SIGSTOP)

    def stopped() -> bool:
        texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(text.rpartition(")")[2].split()[0] == "T" for text in texts)

    wait_until(stopped, f"process {pid} stops")
