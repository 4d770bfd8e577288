"""How much of a model is profiled at once: brute force over runs of layers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workers.profiling.memory import runs_within

ADAM = 2  # of a weight


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 300),
    st.booleans(),
)
def test_runs_are_as_long_as_memory_allows(weights, versions, most, on_host):
    runs = runs_within(weights, versions, most, on_host=on_host)
    if sum(weights) * (2 * versions + ADAM) <= most:
        assert runs == []
        return
    assert [layer for run in runs for layer in run] == list(range(len(weights)))

    def needs(run: range) -> int:
        # Beside the model on its host, or with the run's weights on a GPU: the gradient, its place
        # in the buffer of a sum, and the optimizer's.
        own = sum(weights[layer] for layer in run)
        return sum(weights) + 4 * own if on_host else 5 * own

    assert all(len(run) == 1 or needs(run) <= most for run in runs)
    for run, after in pairwise(runs):
        assert needs(range(run.start, after.start + 1)) > most


def test_nothing_is_known_of_a_unit_without_memory():
    assert runs_within([5, 5], 1, 0, on_host=True) == []
