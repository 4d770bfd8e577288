"""The nearest known name to one that is unknown, for messages."""

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The known name that begins with `name` or is most like it; empty when none is."""
    names = list(known)
    if name and (longer := next((one for one in names if one.startswith(name)), "")):
        return longer
    import difflib  # only when something is wrong

    folded = {one.lower(): one for one in reversed(names)}
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` to end a message with; empty when no known name is near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def near_or_all(name: str, known: Iterable[str]) -> str:
    """As `did_you_mean`; where no known name is near, all of them: `; valid: a, b`."""
    names = list(known)
    return did_you_mean(name, names) or (f"; valid: {', '.join(names)}" if names else "")
