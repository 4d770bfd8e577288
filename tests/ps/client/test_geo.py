"""Geo mode: replicas train alone, exchange differences, and end at the sum of their changes."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ps import LocalShards, ParameterClient, ShardError, TableError
from ps.client.geo import GeoTable

DIM = 4


def make(client: ParameterClient, name: str, **options) -> None:
    client.create_table(name, DIM, optimizer="sgd", learning_rate=1.0, **options)


def ones(count: int, value: float = 1.0) -> np.ndarray:
    return np.full((count, DIM), value, np.float32)


def test_pushes_stay_here_until_the_exchange(client: ParameterClient) -> None:
    make(client, "geo.every")
    keys = np.arange(10)
    first = client.pull("geo.every", keys)
    with GeoTable(client, "geo.every", every=3) as geo:
        np.testing.assert_array_equal(geo.pull(keys), first)
        for _ in range(2):
            geo.push(keys, -ones(10))
        np.testing.assert_allclose(geo.pull(keys), first + 2, rtol=1e-6)
        np.testing.assert_array_equal(client.pull("geo.every", keys), first)
        assert geo.pushes_since_exchange == 2
        geo.push(keys, -ones(10))
        np.testing.assert_allclose(client.pull("geo.every", keys), first + 3, rtol=1e-6)
        assert geo.pushes_since_exchange == 0
        geo.push([3, 3], -ones(2))
    assert client.pull("geo.every", [3])[0] == pytest.approx(first[3] + 5, rel=1e-6)
    with pytest.raises(RuntimeError, match="is closed"):
        geo.pull(keys)


def test_one_worker_trains_as_a_table_of_its_own(client: ParameterClient) -> None:
    """Its optimizer's state is here: Adam steps between exchanges are those of one table."""
    for name in ("geo.adam", "geo.plain"):
        client.create_table(name, DIM, optimizer="adam", learning_rate=0.05, seed=3)
    draw = np.random.default_rng(0)
    with GeoTable(client, "geo.adam", every=4) as geo:
        for _ in range(12):
            keys = draw.integers(0, 50, (3, 7))
            grads = draw.standard_normal((3, 7, DIM)).astype(np.float32)
            np.testing.assert_allclose(
                geo.pull(keys), client.pull("geo.plain", keys), rtol=1e-5, atol=1e-6
            )
            geo.push(keys, grads)
            client.push("geo.plain", keys, grads)
    keys = np.arange(50)
    np.testing.assert_allclose(
        client.pull("geo.adam", keys), client.pull("geo.plain", keys), rtol=1e-5, atol=1e-6
    )


def test_workers_end_at_the_sum_of_their_changes(shards: LocalShards) -> None:
    """Whole numbers, so that the sum is exact in whatever order they arrive."""
    rows, workers, steps = 200, 3, 41

    with ParameterClient(shards.addresses) as client:
        make(client, "geo.sum", initializer="zeros")
    done = threading.Barrier(workers)

    def train(number: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(number)
        total = np.zeros((rows, DIM), np.float32)
        with ParameterClient(shards.addresses) as own:
            geo = GeoTable(own, "geo.sum", every=5 + number)
            for _ in range(steps):
                keys = draw.integers(0, rows, 30)
                grads = draw.integers(-3, 4, (30, DIM)).astype(np.float32)
                geo.pull(keys)
                geo.push(keys, grads)
                np.subtract.at(total, keys, grads)
            geo.sync()
            done.wait()
            geo.push(np.arange(rows), np.zeros((rows, DIM), np.float32))
            geo.sync()
            view = geo.pull(np.arange(rows))
            geo.close()
        return total, view

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(train, range(workers)))
    wanted = sum(total for total, _ in results)
    assert np.abs(wanted).max() > 10
    for _, view in results:
        np.testing.assert_array_equal(view, wanted)


@pytest.mark.parametrize("max_age", [0, 2])
def test_a_row_is_taken_anew_when_it_is_too_old(client: ParameterClient, max_age: int) -> None:
    name = f"geo.age{max_age}"
    make(client, name, initializer="zeros")
    with GeoTable(client, name, every=2, max_age=max_age) as geo:
        geo.pull([7])
        client.add(name, [7], ones(1))
        seen = []
        for _ in range(max_age + 1):  # rounds of pushes to another key
            for _ in range(2):
                seen.append(float(geo.pull([7])[0, 0]))
                geo.push([1], ones(1))
        assert seen == [0.0] * 2 * (max_age + 1)
        assert geo.pull([7])[0, 0] == 1.0


def test_a_row_pushed_to_is_taken_at_every_exchange(client: ParameterClient) -> None:
    make(client, "geo.fresh", initializer="zeros")
    with GeoTable(client, "geo.fresh", every=2, max_age=100) as geo:
        geo.push([7], ones(1))
        client.add("geo.fresh", [7], ones(1, 10.0))
        geo.push([7], ones(1))
        assert geo.pull([7])[0, 0] == 8.0


def test_an_exchange_survives_killed_shards_exactly_once(tmp_path: Path) -> None:
    with (
        LocalShards(2, data=tmp_path) as shards,
        ParameterClient(shards.addresses, timeout_s=1) as client,
    ):
        make(client, "t", initializer="zeros", durability="log")
        keys = np.arange(100)
        geo = GeoTable(client, "t", every=2)
        geo.push(keys, -ones(100))
        os.kill(shards.processes[1].pid, signal.SIGKILL)
        shards.processes[1].process.wait()
        geo.push(keys, -ones(100))  # shard 0 has its part now
        assert geo.pushes_since_exchange == 2
        with pytest.raises(ShardError):
            geo.push(keys, -ones(100))
        np.testing.assert_array_equal(geo.pull(keys), ones(100, 2.0))
        with pytest.raises(ShardError):
            geo.sync()
        shards.restart(1)
        geo.sync()
        np.testing.assert_array_equal(client.pull("t", keys), ones(100, 2.0))
        geo.push(keys, -ones(100))
        geo.close()
        np.testing.assert_array_equal(client.pull("t", keys), ones(100, 3.0))


def test_what_makes_no_sense_is_refused(client: ParameterClient) -> None:
    make(client, "geo.refused")
    with pytest.raises(ValueError, match="every=0"):
        GeoTable(client, "geo.refused", every=0)
    with pytest.raises(ValueError, match="max_age=-1"):
        GeoTable(client, "geo.refused", max_age=-1)
    with pytest.raises(TableError, match="does not exist"):
        GeoTable(client, "geo.nowhere")
    with GeoTable(client, "geo.refused") as geo:
        with pytest.raises(TableError, match="expected"):
            geo.push([1, 2], ones(3))
        with pytest.raises(TableError, match="finite"):
            geo.push([1], ones(1, np.nan))
        assert geo.pushes_since_exchange == 0
