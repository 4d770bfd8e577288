"""A shard that is killed while a client pushes."""

import threading

import numpy as np
from numpy.typing import NDArray

from ps import LocalShards, ParameterClient
from tests.waiting import wait_until


def push_while_killed(
    shards: LocalShards, client: ParameterClient, keys: NDArray[np.int64], dim: int
) -> int:
    """Kill the first shard three times, and have it come back; how often 1 was added to each key.

    Args:
        keys: of the client's table "t", of this `dim`, under SGD at a rate of 1.
    """
    ones = -np.ones((len(keys), dim), np.float32)
    done = threading.Event()
    pushed = 0

    def push() -> None:
        nonlocal pushed
        while not done.is_set():
            client.push("t", keys, ones)
            pushed += 1

    thread = threading.Thread(target=push)
    thread.start()
    try:
        for _ in range(3):
            goal = pushed + 2
            wait_until(lambda goal=goal: pushed >= goal, "more pushes")
            shards.processes[0].process.kill()
            shards.restart(0)
            client.pull("t", keys)
    finally:
        done.set()
        thread.join()
    return pushed
