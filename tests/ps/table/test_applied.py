"""What has been applied of a client, against a plain set."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protos import parameter_server_pb2 as pb
from ps.engine import _native
from ps.table.applied import AppliedWindow, PushId, messages_of, pushes_of

WIDTH = _native.WINDOW
SEQUENCES = st.sets(
    st.one_of(st.integers(0, 50), st.integers(WIDTH - 20, WIDTH + 20), st.integers(0, 3 * WIDTH)),
    max_size=30,
)


def window(sequences: set[int]) -> AppliedWindow:
    """Of an engine's window that has marked them."""
    native = _native.Window()
    for sequence in sorted(sequences):
        native.mark("me", 3, sequence)
    exported = native.export()
    return AppliedWindow(*exported[0]) if exported else AppliedWindow("me", 3)


def recent(sequences: set[int]) -> list[int]:
    highest = max(sequences, default=0)
    return sorted(s for s in sequences if highest - s < WIDTH)


@given(SEQUENCES)
def test_sequences(sequences: set[int]) -> None:
    assert window(sequences).sequences().tolist() == recent(sequences)


@given(SEQUENCES, SEQUENCES)
def test_including(sequences: set[int], more: set[int]) -> None:
    included = window(sequences).including(more)
    assert included.sequences().tolist() == recent(sequences | more)
    assert included.highest == max(sequences | more, default=0)


@given(SEQUENCES)
def test_over_the_wire(sequences: set[int]) -> None:
    sent = replace(window(sequences), end=7)
    message = pb.ClientWindow.FromString(sent.message.SerializeToString())
    assert AppliedWindow.of(message) == sent


@given(
    st.sets(
        st.builds(PushId, st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 9)), max_size=20
    )
)
def test_pushes_travel_by_client(pushes: set[PushId]) -> None:
    messages = messages_of(pushes)
    assert len(messages) == len({push[:2] for push in pushes})
    assert pushes_of(messages) == pushes


def test_a_window_of_ends_alone_has_no_sequences() -> None:
    assert AppliedWindow("me", 1, end=9).sequences().dtype == np.int64
    assert not len(AppliedWindow("me", 1, end=9).sequences())
