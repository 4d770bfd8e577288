"""A replica that is filled."""

import pytest

from protos import parameter_server_pb2 as pb
from ps.shard.replica import Standby
from ps.shard.state import ShardState
from ps.table.applied import PushId
from ps.table.spec import make_spec


@pytest.mark.parametrize("bits", [b"", b"abc"])
def test_a_fill_that_is_refused_replaces_nothing(bits: bytes) -> None:
    state = ShardState()
    state.create(make_spec("t", 4))
    push = PushId("me", 1, 1)
    state.pushes.begin(push)
    state.pushes.commit(push, 1, "", 1)
    before = state.pushes.windows()
    window = pb.ClientWindow(client="other", epoch=1, highest=3, bits=bits)
    first = pb.StateBlock(reset=True, of="primary", number=5, window=[window])
    with pytest.raises(ValueError, match="window bits"):
        Standby(state).absorb(first, iter(()))
    assert list(state.tables) == ["t"]
    assert state.pushes.windows() == before
    assert not state.follows
