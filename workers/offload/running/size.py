"""Sizes of memory, as they are written."""

import re

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(size: int | str, what: str) -> int:
    """Bytes of a number, or of such as "2GB" or "512MiB".

    Raises:
        ValueError: it is neither; names what it is of.
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", size.strip().upper())
    if match is None:
        raise ValueError(f'{what}: expected bytes, or such as "2GB", got {size!r}')
    return int(float(match[1]) * _UNITS[match[2] or ""])
