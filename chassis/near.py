"""The nearest known name to one that is unknown, for messages."""

from collections.abc import Iterable

_SLIP = 0.8  # how alike two names are of which one is likely to be meant by the other


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The known name of which `name` is a slip, the beginning, or the most like it; or ""."""
    import difflib  # only when something is wrong

    names = list(known)
    folded = {one.lower(): one for one in reversed(names)}

    def most_like(least: float) -> str:
        close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=least)
        return folded[close[0]] if close else ""

    begun = (one for one in names if name and one.startswith(name))
    return most_like(max(_SLIP, cutoff)) or next(begun, "") or most_like(cutoff)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` to end a message with; empty when no known name is near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def near_or_all(name: str, known: Iterable[str]) -> str:
    """As `did_you_mean`; where no known name is near, all of them: `; valid: a, b`."""
    names = list(known)
    return did_you_mean(name, names) or (f"; valid: {', '.join(names)}" if names else "")
