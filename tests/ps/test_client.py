"""The client against real shards."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import numpy as np
import pytest
import torch

from protos import parameter_server_pb2 as pb
from protos.channels import connect
from protos.codec import pack
from ps import LocalShards, LocalTable, ParameterClient, ShardError, TableError

PATH = "/heterps.v1.ParameterServer/"


def test_shards_and_local_table_agree(shards: LocalShards, client: ParameterClient) -> None:
    options = {"optimizer": "adam", "learning_rate": 0.1, "seed": 3, "initializer": "normal"}
    client.create_table("agree", 6, **options)
    local = LocalTable.create("agree", 6, **options)
    rng = np.random.default_rng(0)
    for _ in range(5):
        keys = rng.integers(0, 500, (40, 8))
        grads = rng.standard_normal((40, 8, 6)).astype(np.float32)
        np.testing.assert_array_equal(client.pull("agree", keys), local.pull(keys))
        client.push("agree", keys, grads)
        local.push(keys, grads)
    every = np.arange(600)
    np.testing.assert_array_equal(client.pull("agree", every), local.pull(every))
    np.testing.assert_array_equal(client.pull_unique("agree", every), local.pull(every))
    with ParameterClient(shards.addresses) as other:  # it never created the table
        np.testing.assert_array_equal(other.pull("agree", every), local.pull(every))


def test_read_only_pull_grows_nothing(client: ParameterClient) -> None:
    client.create_table("peek", 4, scale=1.0)

    def rows() -> int:
        return sum(t.rows for s in client.stats() for t in s.tables if t.name == "peek")

    peeked = client.pull("peek", np.arange(100), read_only=True)
    assert rows() == 0
    np.testing.assert_array_equal(client.pull("peek", np.arange(100)), peeked)
    assert rows() == 100


def test_large_batches_travel_in_parts(
    client: ParameterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.client.MESSAGE_BYTES", 4096)
    client.create_table("parts", 8, optimizer="sgd", learning_rate=1.0, initializer="zeros")
    keys = np.arange(3000)
    grads = np.repeat(keys[:, None], 8, 1).astype(np.float32)
    client.push("parts", keys, -grads)
    np.testing.assert_array_equal(client.pull("parts", keys[::-1]), grads[::-1])


def test_async(client: ParameterClient) -> None:
    client.create_table("async", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros")
    grads = np.full((10, 2), -1, np.float32)
    futures = []
    for _ in range(20):
        futures.append(client.push_async("async", np.arange(10), grads))
    grads[:] = 99  # ours again as soon as push_async has returned
    for future in futures:
        future.result(10)
    assert (client.pull_async("async", np.arange(10)).result(10) == 20).all()
    empty = client.pull_async("async", torch.empty(0, 3, dtype=torch.int64)).result(10)
    assert empty.shape == (0, 3, 2)
    client.push_async("async", [], np.empty((0, 2), np.float32)).result(10)


def test_concurrent_pushes_all_count(shards: LocalShards, client: ParameterClient) -> None:
    client.create_table("sum", 3, optimizer="sgd", learning_rate=1.0, initializer="zeros")
    keys = np.arange(200) % 50

    def work(mine: ParameterClient) -> None:
        for _ in range(25):
            mine.push("sum", keys, np.full((200, 3), -1, np.float32))

    with ParameterClient(shards.addresses) as other, ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [client, other] * 4))
    assert (client.pull("sum", np.arange(50)) == 8 * 25 * 4).all()


def test_create_table_is_idempotent(client: ParameterClient) -> None:
    assert client.create_table("again", 4, learning_rate=0.5)
    assert not client.create_table("again", 4, learning_rate=0.5)
    with pytest.raises(ShardError, match=r"shard 0 .*learning_rate is 0.5, asked for 0.25") as e:
        client.create_table("again", 4, learning_rate=0.25)
    assert e.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_mistakes_are_named(client: ParameterClient) -> None:
    client.create_table("users", 4)
    with pytest.raises(TableError, match=r"'usres' does not exist.*did you mean 'users'"):
        client.pull("usres", [1])
    with pytest.raises(TableError, match=r"table 'users'.*key 12 .*nan"):
        client.push("users", [11, 12], np.array([[0] * 4, [np.nan] * 4], np.float32))
    with pytest.raises(TableError, match="unknown optimizer"):
        client.create_table("x", 4, optimizer="lion")
    with pytest.raises(ValueError, match="expected host:port"):
        ParameterClient(["nowhere"])
    with pytest.raises(ValueError, match="expected a list"):
        ParameterClient("127.0.0.1:1")


def test_two_clients_must_not_share_a_name(shards: LocalShards) -> None:
    with (
        ParameterClient(shards.addresses, client_id="twin") as first,
        ParameterClient(shards.addresses, client_id="twin") as second,
    ):
        first.create_table("twin", 1)
        first.push("twin", np.arange(9), np.zeros((9, 1), np.float32))
        second.push("twin", np.arange(9), np.zeros((9, 1), np.float32))
        with pytest.raises(ShardError, match="must not share a client_id"):
            first.push("twin", np.arange(9), np.zeros((9, 1), np.float32))


def test_a_repeated_push_is_applied_once(shards: LocalShards) -> None:
    with ParameterClient(shards.addresses[:1]) as client:
        client.create_table("once", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros")
        head = pb.PushRequest(table="once", dim=1, count=1, client="me", epoch=1, sequence=1)
        request = pack(head, np.uint64([5]), np.float32([-1]))
        with connect(shards.addresses[0]) as channel:
            push = channel.unary_unary(PATH + "Push")
            with ThreadPoolExecutor(8) as pool:
                replies = list(pool.map(lambda _: push(request, timeout=10), range(40)))
        assert sum(pb.PushReply.FromString(r).applied for r in replies) == 1
        assert client.pull("once", [5])[0, 0] == 1


def test_garbage_ends_in_a_status(shards: LocalShards, client: ParameterClient) -> None:
    client.create_table("fuzz", 4)
    rng = np.random.default_rng(0)
    keys = np.arange(3, dtype=np.uint64)
    pull = pack(pb.PullRequest(table="fuzz", dim=4, count=3), keys)
    push = pack(
        pb.PushRequest(table="fuzz", dim=4, count=3, client="f", epoch=1, sequence=1),
        keys,
        np.zeros((3, 4), np.float32),
    )
    wrong = {
        "Pull": [
            pack(pb.PullRequest(table="none", dim=4, count=3), keys),
            pack(pb.PullRequest(table="fuzz", dim=5, count=3), keys),
            pack(pb.PullRequest(table="fuzz", dim=4, count=2**61), keys),
            pack(pb.PullRequest(table="fuzz", dim=4, count=2), keys),
            pull[:-1],
            pull + b"\0",
        ],
        "Push": [
            push[:-4],
            pack(pb.PushRequest(table="fuzz", dim=4, count=3), keys, np.zeros((3, 4), np.float32)),
            pack(
                pb.PushRequest(table="fuzz", dim=4, count=3, client="f", epoch=1, sequence=1),
                keys,
                np.full((3, 4), np.nan, np.float32),
            ),
        ],
        "CreateTable": [pb.CreateTableRequest().SerializeToString()],
        "Save": [pb.SaveRequest(directory="x", shards=0).SerializeToString()],
        "Load": [pb.LoadRequest(directory="/nowhere", shards=1).SerializeToString()],
    }
    codes = set()
    with connect(shards.addresses[1]) as channel:
        for method, requests in wrong.items():
            call = channel.unary_unary(PATH + method)
            for request in requests:
                with pytest.raises(grpc.RpcError) as error:
                    call(request, timeout=10)
                codes.add(error.value.code())
                assert error.value.details()
        for method in ("Pull", "Push", "CreateTable", "Save", "Load", "Stats"):
            call = channel.unary_unary(PATH + method)
            for i in range(60):
                data = bytearray(push if method == "Push" else pull)
                for _ in range(1 + i % 4):
                    data[rng.integers(len(data))] = rng.integers(256)
                if i % 3 == 0:
                    data = bytearray(rng.bytes(int(rng.integers(0, 200))))
                with suppress(grpc.RpcError):
                    call(bytes(data), timeout=10)
    assert codes == {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
    assert shards.processes[1].poll() is None
    assert client.pull("fuzz", [1, 2, 3]).shape == (3, 4)


def _exit_code(child: int, timeout_s: float) -> int | None:
    done = threading.Event()
    status: list[int] = []

    def reap() -> None:
        status.append(os.waitpid(child, 0)[1])
        done.set()

    threading.Thread(target=reap, daemon=True).start()
    return os.waitstatus_to_exitcode(status[0]) if done.wait(timeout_s) else None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_a_forked_child_connects_anew(shards: LocalShards, used: bool) -> None:
    client = ParameterClient(shards.addresses, timeout_s=10)
    table = f"fork-{used}"
    options = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
    if used:
        client.create_table(table, 2, **options)
        client.pull(table, np.arange(30))
    local = LocalTable.create("fork", 2)
    local.pull(np.arange(40_000))  # starts the engine's threads, which the child will lack
    child = os.fork()
    if child == 0:
        code = 1
        try:
            local.pull(np.arange(40_000))
            client.create_table(table, 2, **options)
            client.push(table, np.arange(30), np.full((30, 2), -1, np.float32))
            code = 0
        finally:
            os._exit(code)
    assert _exit_code(child, 30) == 0
    assert (client.pull(table, np.arange(30)) == 1).all()
    client.close()
