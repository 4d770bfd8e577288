"""In which order a training asks for experts, as seen from what it has asked for so far."""

from collections.abc import Sequence

_FADES = 1 / 4  # the share of the latest guess in how right guesses are
_WORTH = 3 / 4  # how right they must be: a wrong one is read for nothing, in place of another


class Order:
    """Which layer comes after which, and which experts it is likely to need.

    Two calls tell which one follows: forwards come layer by layer, then backwards the other way.
    Its experts are those that it needed the last time. A backward's are its forward's then, to the
    last; a forward's those of the step before, which are nearly all in a large batch. Where less
    than three quarters of them were right lately, after the same two calls, none are told.
    """

    def __init__(self) -> None:
        self._calls = (-1, -1)  # the last two, by their layers
        self._after: dict[tuple[int, int], int] = {}
        self._needed: dict[int, frozenset[int]] = {}
        self._right: dict[tuple[int, int], float] = {}

    def follow(self, layer: int, experts: Sequence[int]) -> list[tuple[int, int]]:
        """A layer is asked for these; what is likely to be next: a layer, and which of it."""
        needed = frozenset(experts)
        self._judge(layer, needed)
        self._after[self._calls] = layer
        self._needed[layer] = needed
        self._calls = self._calls[1], layer
        then = self._after.get(self._calls)
        if then is None or self._right.get(self._calls, 1.0) < _WORTH:
            return []
        return [(then, e) for e in sorted(self._needed[then])]

    def _judge(self, layer: int, needed: frozenset[int]) -> None:
        """See how right the last guess was, also where it was not told."""
        then = self._after.get(self._calls)
        if then is None or not (guessed := self._needed[then]):
            return
        share = len(guessed & needed) / len(guessed) if then == layer else 0.0
        before = self._right.get(self._calls, 1.0)
        self._right[self._calls] = before + _FADES * (share - before)
