"""The client against real shards."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from chassis.channels import connect
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import LocalShards, LocalTable, ParameterClient, ShardError, TableError
from ps.table.rules import Admission, Eviction, Score

PATH = "/heterps.v1.ParameterServer/"


def test_shards_and_local_table_agree(shards: LocalShards, client: ParameterClient) -> None:
    options: dict[str, Any] = {
        "optimizer": "adam",
        "learning_rate": 0.1,
        "seed": 3,
        "initializer": "normal",
    }
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


def test_shards_and_local_table_agree_on_usage(client: ParameterClient) -> None:
    """Counts and scores are summed over equal keys before they travel."""
    options: dict[str, Any] = {
        "optimizer": "sgd",
        "learning_rate": 1.0,
        "score": Score(non_click=0.25, click=1.0, decay=0.5),
        "admission": Admission(kind="score", threshold=2.0, reads="zeros"),
        "eviction": Eviction(min_score=1.5),
    }
    client.create_table("usage", 3, **options)
    local = LocalTable.create("usage", 3, **options)
    rng = np.random.default_rng(0)
    for _ in range(6):
        keys = rng.integers(0, 200, 150)
        grads = rng.standard_normal((150, 3)).astype(np.float32)
        shows = rng.integers(0, 4, 150).astype(np.float32)
        clicks = np.minimum(shows, rng.integers(0, 3, 150)).astype(np.float32)
        client.push("usage", keys, grads, shows=shows, clicks=clicks)
        local.push(keys, grads, shows=shows, clicks=clicks)
    every = np.arange(200)
    admitted = len(local)
    assert 20 < admitted < 180
    np.testing.assert_allclose(client.pull("usage", every), local.pull(every), rtol=1e-5, atol=1e-6)
    removed = local.shrink()
    assert 0 < removed < admitted
    assert client.shrink("usage") == removed
    assert sorted(client.keys("usage", 1000).tolist()) == sorted(local.keys().tolist())


def test_tables_come_and_go(client: ParameterClient) -> None:
    for name in ("go-a", "go-b", "stay"):
        client.create_table(name, 2)
    assert client.drop_tables("go-") == ["go-a", "go-b"]
    assert client.drop_tables("go-") == []
    with pytest.raises(TableError, match="'go-a' does not exist"):
        client.pull("go-a", [1])
    assert client.pull("stay", [1]).shape == (1, 2)
    assert client.create_table("go-a", 5)  # another table of that name
    assert client.pull("go-a", [1]).shape == (1, 5)
    with pytest.raises(ShardError, match="the prefix is empty"):
        client.drop_tables("")


def test_large_batches_travel_in_parts(
    shards: LocalShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ps.client.pull.MESSAGE_BYTES", 4096)
    with ParameterClient(shards.addresses, shared_memory=False) as client:
        client.create_table("parts", 8, optimizer="sgd", learning_rate=1.0, initializer="zeros")
        keys = np.arange(3000)
        grads = np.repeat(keys[:, None], 8, 1).astype(np.float32)
        calls: list[str] = []
        for shard in client.session().shards:
            ask = shard.pull
            monkeypatch.setattr(
                shard,
                "pull",
                lambda request, what, ask=ask, **how: (
                    calls.append(what),
                    ask(request, what, **how),
                )[1],
            )
        client.push("parts", keys, -grads)
        np.testing.assert_array_equal(client.pull("parts", keys[::-1]), grads[::-1])
        assert len(calls) >= 3000 * 8 * 4 // 4096


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


def test_a_restarted_shard_is_found_again() -> None:
    """Its address stays; the shared memory it had mapped does not."""
    with LocalShards(1) as shards, ParameterClient(shards.addresses) as client:
        options = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
        client.create_table("back", 2, durability="log", **options)
        keys, grads = np.arange(500), np.full((500, 2), -1, np.float32)
        for _ in range(3):
            client.push("back", keys, grads)
            assert (client.pull("back", keys) == client.pull("back", [0])).all()
            shards.restart(0)
        assert (client.pull("back", keys) == 3).all()


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
