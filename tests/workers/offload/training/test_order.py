"""What a training is expected to ask for next is what it asked for at the same place before."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from workers.offload.training.order import Order

some = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True).map(sorted)


def calls(used: Sequence[list[int]]) -> list[tuple[int, list[int]]]:
    """Of a step: forwards, and backwards the other way."""
    there = list(enumerate(used))
    return [*there, *reversed(there)]


@given(st.integers(2, 4).flatmap(lambda n: st.lists(st.tuples(*[some] * n), min_size=2)))
def test_backwards_are_foreseen_to_the_expert(steps: list[tuple[list[int], ...]]) -> None:
    """And forwards by the step before, if at all."""
    order = Order()
    layers = len(steps[0])
    for number, used in enumerate(steps):
        asked = calls(used)
        for i, (layer, needed) in enumerate(asked):
            told = order.follow(layer, needed)
            if number == 0:
                continue
            then = (i + 1) % (2 * layers)
            if then >= layers:
                following, foreseen = asked[then]
                assert told == [(following, e) for e in foreseen]
            elif told:
                foreseen = used[then] if then <= i else steps[number - 1][then]
                assert told == [(then, e) for e in foreseen]


def test_guesses_that_are_wrong_are_not_told_until_they_are_right_again() -> None:
    order = Order()

    def step(first: int, second: int) -> list[tuple[int, int]]:
        """What is expected after the first of two layers."""
        told = [order.follow(layer, experts) for layer, experts in calls([[first], [second]])]
        return told[0]

    told = [step(0, i) for i in range(9)]
    assert told[2] == [(1, 1)]
    assert told[-1] == []
    assert [step(0, 3) for _ in range(9)][-1] == [(1, 3)]
