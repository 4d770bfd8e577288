"""Bounded staleness: fast workers wait for slow ones, but not for those that are gone."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ps import LocalShards, ParameterClient, ShardError

WORKER = """
import sys, time
import numpy as np
from ps import ParameterClient
address, number, workers, steps, staleness, pause = sys.argv[1:]
with ParameterClient([address], timeout_s=60) as client:
    for step in range(1, int(steps) + 1):
        time.sleep(float(pause))
        client.push("clock", [int(number)], np.float32([[-1]]))
        client.advance("ssp", int(number), int(workers), step, int(staleness))
        print(step, *client.pull("clock", np.arange(int(workers)))[:, 0].astype(int), flush=True)
"""


@pytest.mark.parametrize("staleness", [0, 2])
def test_processes_of_uneven_speed_stay_within_the_bound(
    staleness: int,
) -> None:
    steps, pauses = 12, [0.0, 0.0, 0.05]
    with LocalShards(1) as alone, ParameterClient(alone.addresses) as client:
        client.create_table("clock", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros")
        arguments = [str(len(pauses)), str(steps), str(staleness)]
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-c", WORKER, alone.addresses[0], str(number)),
                    *(*arguments, str(pause)),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, pause in enumerate(pauses)
        ]
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    spread = 0
    for number, output in enumerate(outputs):
        lines = [[int(word) for word in line.split()] for line in output.splitlines()]
        assert [line[0] for line in lines] == list(range(1, steps + 1))
        for step, *pushed in lines:
            assert pushed[number] == step
            assert min(pushed) >= step - staleness, "what it pulls is no older than the bound"
            spread = max(spread, step - min(pushed))
    assert spread == staleness, "the bound is reached, not only kept"


def test_a_fast_worker_is_held_exactly_at_the_bound(client: ParameterClient) -> None:
    for clock in (1, 2, 3):
        assert client.advance("exact", 0, 2, clock, staleness=3) == 0
    with pytest.raises(
        TimeoutError,
        match=r"'exact': worker 0 is at 4, the slowest, worker 1, at 0; expected at most 3",
    ):
        client.advance("exact", 0, 2, 4, staleness=3, timeout_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.advance, "exact", 0, 2, 4, staleness=3)
        assert client.advance("exact", 1, 2, 1, staleness=3) == 1
        assert held.result(20) == 1
    with pytest.raises(TimeoutError):
        client.advance("exact", 0, 2, 5, staleness=3, timeout_s=0.1)


def test_a_barrier_lets_nobody_through_before_the_last(client: ParameterClient) -> None:
    workers, steps = 3, 6
    lock, at = threading.Lock(), [0] * workers

    def work(number: int) -> None:
        for step in range(1, steps + 1):
            with lock:
                at[number] = step
            client.advance("barrier", number, workers, step)
            with lock:
                assert min(at) >= step
                assert max(at) <= step + 1

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))


def test_a_worker_that_leaves_holds_nobody_back(client: ParameterClient) -> None:
    client.advance("leaves", 0, 2, 0)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.advance, "leaves", 0, 2, 1000)
        client.leave("leaves", 1, 2)
        assert held.result(20) == 1000
    client.leave("leaves", 0, 2)
    client.leave("leaves", 0, 2)  # said twice: as a repeated call would
    with pytest.raises(TimeoutError, match="worker 0, at 0"):  # a new run of that name
        client.advance("leaves", 1, 2, 1, timeout_s=0.1)


def test_a_dead_worker_expires(client: ParameterClient) -> None:
    client.advance("dead", 1, 3, 5, staleness=9)
    client.leave("dead", 2, 3)
    with pytest.raises(TimeoutError, match="the slowest, worker 1, at 5"):
        client.advance("dead", 0, 3, 100, timeout_s=0.1)
    assert client.advance("dead", 0, 3, 100, timeout_s=30, expire_s=0.5) == 100
    with pytest.raises(TimeoutError, match="worker 0, at 100"):  # it is back
        client.advance("dead", 1, 3, 101, timeout_s=0.1)
    with pytest.raises(TimeoutError, match="worker 1, at 101"):
        client.advance("dead", 0, 3, 102, timeout_s=0.1, expire_s=60)


def test_a_worker_that_waits_is_not_dead(client: ParameterClient) -> None:
    """It calls, so it counts, however long it waits."""
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(client.advance, "waits", 1, 3, 2, timeout_s=30)
        time.sleep(0.6)
        with pytest.raises(TimeoutError, match="worker 1, at 2"):
            client.advance("waits", 0, 3, 3, timeout_s=0.1, expire_s=0.3)
        client.leave("waits", 0, 3)
        client.leave("waits", 2, 3)
        assert waits.result(20) == 2


def test_waiting_workers_leave_threads_for_pushes() -> None:
    workers = 12
    with (
        LocalShards(1, options=("--threads", "4")) as shards,
        ParameterClient(shards.addresses, timeout_s=60) as waiting,
        ParameterClient(shards.addresses, timeout_s=1.5) as pushing,
    ):
        pushing.create_table("t", 1)
        with ThreadPoolExecutor(workers - 1) as pool:
            held = [
                pool.submit(waiting.advance, "many", number, workers, 1)
                for number in range(workers - 1)
            ]
            time.sleep(0.3)  # all of them ask
            for _ in range(20):
                pushing.push("t", [1], np.ones((1, 1), np.float32))
            assert not any(future.done() for future in held)
            pushing.advance("many", workers - 1, workers, 1, timeout_s=20)
            assert {future.result(20) for future in held} == {1}


def test_numbers_that_make_no_sense_are_refused(client: ParameterClient) -> None:
    client.advance("numbers", 0, 2, 0)
    for call, message in (
        (lambda: client.advance("numbers", 2, 2, 1), "worker 2 of 2"),
        (lambda: client.advance("numbers", 0, 3, 1), "has 2 workers; the request says 3"),
        (lambda: client.advance("numbers", 0, 2, 0, expire_s=-1.0), "expire_s=-1"),
    ):
        with pytest.raises(ShardError, match=message):
            call()
