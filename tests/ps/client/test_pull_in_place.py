"""Rows that the shards of this host write where the caller reads them."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from protos.parameter_server_pb2 import DropTablesRequest
from ps import LocalShards, ParameterClient, ShardError
from ps.client.fetch import Wanted
from ps.client.pull_in_place import PullInPlace
from ps.shm.blocks import SharedMemory
from ps.shm.region import MOST_BYTES
from tests.waiting import wait_until

DIM = 8
KEYS = np.arange(-4000, 4000)


@pytest.fixture(scope="module", params=[1, 3])
def filled(request: pytest.FixtureRequest) -> Iterator[LocalShards]:
    with LocalShards(request.param) as shards, ParameterClient(shards.addresses) as client:
        client.create_table("t", DIM, optimizer="sgd", learning_rate=1.0, initializer="zeros")
        client.push("t", KEYS, -_rows(KEYS))
        yield shards


@pytest.fixture
def client(filled: LocalShards) -> Iterator[ParameterClient]:
    with ParameterClient(filled.addresses, timeout_s=20) as connected:
        yield connected


def _rows(keys: NDArray[np.int64]) -> NDArray[np.float32]:
    return (keys[..., None] * DIM + np.arange(DIM)).astype(np.float32)


def _memory(client: ParameterClient) -> SharedMemory:
    session = client.session()
    memory = session.memory()
    assert memory is not None
    return memory


def test_the_way_is_taken(client: ParameterClient) -> None:
    wanted = Wanted("t", DIM, KEYS.astype(np.uint64), "float32", read_only=True)
    begun = PullInPlace.begin(client.session(), [wanted])
    assert begun is not None
    rows = begun.finish()
    assert rows is not None
    np.testing.assert_array_equal(rows[0], _rows(KEYS))


@pytest.mark.parametrize("count", [1, 7, 20_000, 90_000])
def test_rows_come_in_the_caller_s_order(client: ParameterClient, count: int) -> None:
    keys = np.random.default_rng(count).choice(KEYS, (count, 1))
    rows = client.pull("t", keys)
    assert rows.shape == (count, 1, DIM)
    np.testing.assert_array_equal(rows, _rows(keys))
    np.testing.assert_array_equal(client.pull_async("t", keys).result(20), rows)


def test_keys_without_rows_read_their_first_value(client: ParameterClient) -> None:
    assert not client.pull("t", [10**12, 5 * 10**12]).any()
    assert client.pull("t", np.empty((0, 2), np.int64)).shape == (0, 2, DIM)


def test_an_array_is_the_caller_s_own(client: ParameterClient) -> None:
    """However many are kept, none changes by another pull, nor the table by a write to one."""
    keys = [np.roll(KEYS, i).repeat(3) for i in range(400)]  # 300 MB of rows
    kept = [client.pull("t", k) for k in keys]
    for k, rows in zip(keys, kept, strict=True):
        np.testing.assert_array_equal(rows[::97], _rows(k[::97]))
    kept[0][:] = np.nan
    kept[-1][:] = np.nan
    np.testing.assert_array_equal(client.pull("t", KEYS), _rows(KEYS))


def test_blocks_come_back(client: ParameterClient) -> None:
    for _ in range(50):
        rows = client.pull("t", KEYS.repeat(4))
        part = rows[5:9, 1]  # a view keeps the block
        del rows
        np.testing.assert_array_equal(part, _rows(KEYS.repeat(4))[5:9, 1])
    assert len(_memory(client)._attached) <= 3


def test_a_shard_lets_go_of_what_its_client_had(filled: LocalShards) -> None:
    def mapped(names: list[str]) -> int:
        maps = Path(f"/proc/{filled.processes[0].pid}/maps").read_text()
        return sum(name in maps for name in names)

    with ParameterClient(filled.addresses) as client:
        kept = [client.pull("t", KEYS.repeat(10)) for _ in range(3)]
        names = [block.region.name for block in _memory(client)._attached]
        assert len(names) == mapped(names) == 3
        del kept
    wait_until(lambda: mapped(names) == 0, "nothing is mapped")


def test_the_caller_s_keys_may_change_at_once(client: ParameterClient) -> None:
    keys = KEYS.repeat(5)
    expected = _rows(keys)
    future = client.pull_async("t", keys)
    keys[:] = 0
    np.testing.assert_array_equal(future.result(20), expected)


def test_what_no_block_can_hold_goes_another_way(client: ParameterClient) -> None:
    keys = np.resize(KEYS, MOST_BYTES // (4 * DIM) + 1)
    rows = client.pull("t", keys)
    np.testing.assert_array_equal(rows[::1001], _rows(keys[::1001]))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_keeps_the_rows_of_its_parent(client: ParameterClient) -> None:
    ahead = [client.pull("t", KEYS.repeat(4)) for _ in range(2)]
    rows = ahead.pop()
    go, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        os.read(go, 1)  # until the parent has pulled again
        os._exit(0 if (rows == _rows(KEYS.repeat(4))).all() else 1)
    os.close(go)
    del rows
    for i in range(8):
        client.pull("t", np.roll(KEYS.repeat(4), 1 + i))
    os.close(ready)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_caller_s_gradients_may_change_at_once(client: ParameterClient) -> None:
    """Also where a push has to be split anew, since buckets have moved."""
    name = "reused"
    client.create_table(name, DIM, optimizer="sgd", learning_rate=1.0, initializer="zeros")
    with LocalShards(1) as more:
        addresses = client.session().routes.addresses
        with ParameterClient(addresses) as other:
            other.reshard([*addresses, *more.addresses])
            grads = -_rows(KEYS)
            future = client.push_async(name, KEYS, grads, distinct=True)
            grads[:] = np.nan
            future.result(20)
            np.testing.assert_array_equal(client.pull(name, KEYS), _rows(KEYS))
            other.reshard(addresses)
        np.testing.assert_array_equal(client.pull(name, KEYS), _rows(KEYS))


@pytest.mark.parametrize("background", [False, True])
def test_blocks_of_other_shards_come_back_where_one_refuses(background: bool) -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses, wire="bfloat16") as client:
        client.create_table("t", DIM)
        client.pull("t", KEYS)
        shard = client.session().shards[1]
        shard.call(shard.stub.DropTables, DropTablesRequest(prefix="t"), "DropTables")
        for _ in range(3):
            with pytest.raises(ShardError, match="'t'"):
                client.pull_async("t", KEYS).result(20) if background else client.pull("t", KEYS)
            memory = _memory(client)
            assert memory._attached
            assert {*memory._free} == memory._attached
