"""Waiting, in tests, for something to become so."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT_S = 120.0  # only a hang reaches it, however busy the machine


def wait_until(
    ready: Callable[[], T],
    what: str | Callable[[], object] = "",
    timeout_s: float = LIMIT_S,
    pause_s: float = 0.05,
) -> T:
    """What `ready` gives once that is true.

    Args:
        what: is waited for; a function says it when it is too late.
        pause_s: between two looks.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := ready()):
        if time.monotonic() > deadline:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {timeout_s:g} s: {told or 'see the call'}")
        time.sleep(pause_s)
    return found
