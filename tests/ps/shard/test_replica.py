"""A replica that is filled."""

from pathlib import Path

import grpc
import numpy as np
import pytest

from chassis.process import module_argv, spawn
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import CheckpointError, LocalShards, LocalTable, ParameterClient, ShardError
from ps.errors import ConflictError, LacksChangesError
from ps.local.table import save_checkpoint
from ps.shard.journal import BehindError, Buffer, Place, nowhere, settle
from ps.shard.load import read_rows
from ps.shard.replica import Standby
from ps.shard.state import ShardState
from ps.table.applied import PushId
from ps.table.buckets import Share
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


def test_a_load_is_refused_by_all_shards_while_a_replica_is_away(tmp_path: Path) -> None:
    keys = np.arange(100)
    ones = np.ones((100, 1), np.float32)
    with (
        LocalShards(2, replicas=True) as shards,
        ParameterClient(shards.addresses, timeout_s=1) as client,
    ):
        for name in ("kept", "plain"):
            client.create_table(
                name,
                1,
                optimizer="sgd",
                initializer="zeros",
                learning_rate=1,
                durability="replica" if name == "kept" else "none",
            )
            client.push(name, keys, -ones)
        client.save(tmp_path / "ck")
        for name in ("kept", "plain"):
            client.push(name, keys, -ones)
        shards.replicas[1].stop()
        with pytest.raises(ShardError, match="the replica does not answer"):
            client.load(tmp_path / "ck", timeout_s=20)
        for name in ("kept", "plain"):
            assert (client.pull(name, keys) == 2).all(), "as it was, on both"
        shards.restart_replica(1)
        client.load(tmp_path / "ck", timeout_s=20)
        shards.processes[1].process.kill()
        shards.restart(1)
        assert (client.pull("kept", keys) == 1).all()


def test_what_is_lost_with_a_shard_and_its_replica_is_told(tmp_path: Path) -> None:
    """Nothing with a log. What the replica alone kept is gone as a whole, never in part."""
    keys = np.arange(100)
    ones = np.ones((100, 1), np.float32)
    with (
        LocalShards(2, replicas=True) as shards,
        ParameterClient(shards.addresses, timeout_s=5) as client,
    ):
        for name in ("log", "replica"):
            client.create_table(
                name,
                1,
                optimizer="sgd",
                initializer="zeros",
                learning_rate=1,
                durability=name,
            )
            client.push(name, keys, -ones)
        for child in (shards.processes[0], shards.replicas[0]):
            child.process.kill()
        for child in (shards.processes[0], shards.replicas[0]):
            child.process.wait()
        shards.restart_replica(0)
        shards.restart(0)
        assert (client.pull("log", keys) == 1).all()
        client.push("log", keys, -ones)
        assert (client.pull("log", keys) == 2).all()
        for asked in (
            lambda: client.pull("replica", keys),
            lambda: client.push("replica", keys, -ones),
        ):
            with pytest.raises(ShardError, match="table 'replica' does not exist here") as told:
                asked()
            assert told.value.code is grpc.StatusCode.NOT_FOUND
        with pytest.raises(CheckpointError, match="replica"):
            client.save(tmp_path / "ck")


class _Away:
    """A journal that can be away."""

    def __init__(self) -> None:
        self.behind = self.away = False
        self.kept: list[str] = []

    def append(self, kind: str, time_s: int, payload: Buffer, place: Place = nowhere) -> None:
        if self.behind:
            raise BehindError("away")
        self.kept.append(kind)
        settle(place)

    def check(self) -> None:
        pass

    def fall_behind(self) -> None:
        self.behind = True

    def renew(self, *, closed: bool = False, behind: bool = False) -> None:
        if self.away:
            raise TimeoutError("the replica does not answer")
        self.behind = False


def test_no_push_is_kept_upon_rows_that_a_load_has_replaced(tmp_path: Path) -> None:
    """A replica that was away as the load ended, and is back, still has the rows of before."""
    state, journal = ShardState(), _Away()
    state.journals["replica"] = journal
    table = LocalTable.create("t", 1, initializer="zeros", durability="replica")
    table.pull([1])
    save_checkpoint(tmp_path, [table])
    state.create(table.spec)
    loaded = read_rows(state, str(tmp_path), Share(0, 1))
    loaded.put_in_use(state)
    journal.away = True
    with pytest.raises(TimeoutError):
        loaded.finish(state)
    with pytest.raises(TimeoutError):
        state.drop("other")
    assert journal.kept == ["create"]
    journal.away = False
    state.drop("other")
    assert journal.kept == ["create", "drop"]
