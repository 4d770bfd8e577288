"""The nearest known name to one that is unknown, for messages."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """The name most like `name`, empty when none is like it."""
    close = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=cutoff)
    return close[0] if close else ""
