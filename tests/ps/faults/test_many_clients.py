"""Many clients of one shard by streams, which is killed meanwhile: each is counted exactly once."""

import os
import signal
import threading
import time

import numpy as np

from ps import LocalShards, ParameterClient
from tests.rounds import rounds

PUSHES = 4
KEYS = np.arange(200)


class Client(threading.Thread):
    """Adds 1 to all keys some times."""

    def __init__(self, addresses: list[str]) -> None:
        super().__init__(daemon=True)
        self.client = ParameterClient(addresses, timeout_s=120, shared_memory=False)
        self.error: BaseException | None = None
        self.streamed = 0

    def run(self) -> None:
        try:
            for _ in range(PUSHES):
                self.client.push("t", KEYS, np.full((len(KEYS), 2), -1, np.float32))
                streams = self.client.session().shards[0]._streams
                self.streamed += streams is not None and streams.open
                time.sleep(0.05)
        except BaseException as error:
            self.error = error


@rounds("clients", few=24, many=500)
def test_many_clients_of_a_shard_that_is_killed(clients: int) -> None:
    with (
        LocalShards(1, supervised=True) as shards,
        ParameterClient(shards.addresses, timeout_s=120) as reader,
    ):
        reader.create_table(
            "t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log"
        )
        everybody = [Client(shards.addresses) for _ in range(clients)]
        for each in everybody:
            each.start()
        time.sleep(0.3)
        os.kill(shards.processes[0].pid, signal.SIGKILL)
        for each in everybody:
            each.join(240)
            assert not each.is_alive()
        assert [each.error for each in everybody if each.error] == []
        assert (reader.pull("t", KEYS) == clients * PUSHES).all()
        assert sum(each.streamed for each in everybody) > 0
        for each in everybody:
            each.client.close()
