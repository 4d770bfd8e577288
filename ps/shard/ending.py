"""The end of a shard that could not finish a change: journals have it whole, memory may not."""

import logging
import os
from typing import NoReturn

_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
_log = logging.getLogger("heterps.ps")


def end_process(why: str) -> NoReturn:
    """End at once, so that nobody meets a change that was made in part."""
    _log.critical("%s; the shard ends, to come back with what its journals have", why)
    os._exit(_EXIT_CODE)
