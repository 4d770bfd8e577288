"""Where the scheduler is, for a node that was started together with it."""

import json
import threading
import time
from pathlib import Path

from chassis.files import read_regular

_LOOK_S = 0.01
_MOST_BYTES = 1 << 20


class WhereaboutsError(RuntimeError):
    """The scheduler did not say where it is."""


def announced(file: Path, wait_s: float, stop: threading.Event) -> str:
    """The address that a scheduler has announced in its ready file; empty: `stop` came first.

    Args:
        file: not there before that scheduler is: one of another would be believed.
        wait_s: seconds that it may take.

    Raises:
        WhereaboutsError: it did not, or wrote no address.
    """
    until = time.monotonic() + wait_s
    while not file.exists():
        if stop.wait(_LOOK_S):
            return ""
        if time.monotonic() > until:
            raise WhereaboutsError(
                f"--found-in {file}: no scheduler announced itself within {wait_s:g} s"
            )
    try:
        address = json.loads(read_regular(file, _MOST_BYTES))["address"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WhereaboutsError(f"--found-in {file}: no announcement: {error}") from None
    if not isinstance(address, str) or not address:
        raise WhereaboutsError(f"--found-in {file}: address: got {address!r}, expected HOST:PORT")
    return address
