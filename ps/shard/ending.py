"""The end of a shard that could not finish a change: journals have it whole, memory may not."""

import logging
import os
from typing import NoReturn

UNFINISHED = 70  # EX_SOFTWARE of sysexits.h
_log = logging.getLogger("heterps.ps")


def end_process(what: str, *values: object) -> NoReturn:
    """End at once, so that nobody meets a change that was made in part.

    Args:
        what: went wrong, as logging takes it: there may be no memory left to say so.
        values: in it.
    """
    try:
        _log.critical(f"{what}; the shard ends, to come back with what its journals have", *values)
    finally:
        os._exit(UNFINISHED)
