"""A replica that is filled."""

from pathlib import Path

import numpy as np
import pytest

from chassis.process import module_argv, spawn
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import LocalShards, ParameterClient, ShardError
from ps.errors import ConflictError, LacksChangesError
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


def _record(of: str, number: int) -> bytes:
    spec = make_spec("t", 4, durability="replica").SerializeToString()
    return pack(pb.LogRecord(kind="create", of=of, number=number), spec)


def test_a_replica_asks_for_the_whole_state_and_follows_one_shard() -> None:
    standby = Standby(ShardState())
    with pytest.raises(LacksChangesError):
        standby.replicate(_record("a", 1))
    standby.absorb(pb.StateBlock(reset=True, of="a", number=1), iter(()))
    with pytest.raises(LacksChangesError):
        standby.replicate(_record("a", 3))
    standby.replicate(_record("a", 2))
    with pytest.raises(ConflictError, match="follows another shard") as caught:
        standby.replicate(_record("b", 1))
    assert not isinstance(caught.value, LacksChangesError)
    with pytest.raises(ConflictError, match="follows another shard"):
        standby.absorb(pb.StateBlock(reset=True, of="b"), iter(()))
    standby.replicate(_record("a", 3))


def test_a_shard_whose_place_was_taken_changes_nothing_any_more(tmp_path: Path) -> None:
    """Two that live share a replica: the later one has it, and the earlier is told so."""
    keys = np.arange(10)
    ones = np.ones((10, 1), np.float32)
    with LocalShards(1, replicas=True) as shards:
        arguments = ["--bind", "127.0.0.1:0", "--replica", shards.replicas[0].address]
        with ParameterClient(shards.addresses, timeout_s=20) as old:
            old.create_table(
                "t", 1, optimizer="sgd", initializer="zeros", durability="replica", learning_rate=1
            )
            old.push("t", keys, -ones)
            later = spawn("ps later", module_argv("ps.server", *arguments), directory=tmp_path)
            try:
                later.wait_ready(60.0)
                with ParameterClient([later.address], timeout_s=20) as new:
                    new.push("t", keys, -ones)
                    with pytest.raises(ShardError, match="follows another shard"):
                        old.push("t", keys, -ones)
                    new.push("t", keys, -ones)
                    assert (new.pull("t", keys) == 3).all()
                    assert (old.pull("t", keys) == 1).all()
            finally:
                later.stop()
