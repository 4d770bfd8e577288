"""A shard that is killed while it moves rows on its disk has every row that it acknowledged."""

import contextlib
import random
import threading
import time
from pathlib import Path

import numpy as np

from ps import CheckpointError, LocalShards, LocalTable, ParameterClient, ShardError
from tests.ps.crowded import crowded
from tests.rounds import rounds
from tests.waiting import wait_until

DIM, COUNT = 8, 6000
MEMORY = 64 * 110_000  # a sixth of the rows
EXTENT = 256


class Pusher(threading.Thread):
    """Adds small numbers to random keys; a dictionary has what was acknowledged."""

    def __init__(self, addresses: list[str]) -> None:
        super().__init__(daemon=True)
        self.client = ParameterClient(addresses, timeout_s=60)
        self.sums: dict[int, int] = {}
        self.between = threading.Lock()  # held while a push is under way
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._keys = crowded(COUNT)
        self._rng = np.random.default_rng(17)

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                keys = self._keys[self._rng.choice(COUNT, 700, replace=False)]
                values = self._rng.integers(1, 9, len(keys))
                grads = -np.repeat(values[:, None], DIM, 1).astype(np.float32)
                with self.between:
                    self.client.push("t", keys, grads)
                    for key, value in zip(keys.tolist(), values.tolist(), strict=True):
                        self.sums[key] = self.sums.get(key, 0) + value
                time.sleep(0.001)  # so that others may have the lock
        except BaseException as error:
            self.error = error


@rounds("kills", few=3, many=30)
def test_nothing_acknowledged_is_lost_or_doubled(tmp_path: Path, kills: int) -> None:
    """Killed at any moment of it, of folds and of saves; recovery tidies, and is killed, too."""
    chance = random.Random(11)
    with (
        LocalShards(1, options=("--fold", "1")) as shards,
        ParameterClient(shards.addresses, timeout_s=60) as client,
    ):
        client.create_table(
            "t",
            DIM,
            optimizer="sgd",
            learning_rate=1.0,
            initializer="zeros",
            durability="log",
            memory_bytes=MEMORY,
        )
        pusher = Pusher(shards.addresses)

        def total(name: str) -> int:
            assert pusher.error is None, pusher.error
            return sum(getattr(t, name) for s in client.stats() for t in s.tables)

        def compare() -> None:
            with pusher.between:
                keys = np.array(sorted(pusher.sums))
                rows = client.pull("t", keys)
                assert total("rows") == len(pusher.sums)
            expected = np.array([pusher.sums[key] for key in keys.tolist()], np.float32)
            np.testing.assert_array_equal(rows, np.repeat(expected[:, None], DIM, 1))

        def save() -> None:
            with contextlib.suppress(ShardError, CheckpointError):  # its shard is killed
                client.save(tmp_path / "ck", timeout_s=60)

        pusher.start()
        try:
            for number in range(kills):
                tidied = total("tidied")
                wait_until(lambda t=tidied: total("tidied") > t + EXTENT, "rows move")
                saving = threading.Thread(target=save)
                if number % 3 == 2:
                    saving.start()
                time.sleep(chance.uniform(0, 0.05))
                shards.processes[0].process.kill()
                shards.restart(0)
                if number % 2:
                    compare()
                if saving.ident is not None:
                    saving.join()
            compare()
            assert total("disk_rows") > COUNT // 2
            tidied = total("tidied")
            with pusher.between:
                client.save(tmp_path / "whole")
                at_save = dict(pusher.sums)
            wait_until(lambda: total("tidied") > tidied + EXTENT, "rows move")
        finally:
            pusher.ended.set()
            pusher.join()
        compare()
        pusher.client.close()
    saved = LocalTable.load_checkpoint(tmp_path / "whole")["t"]
    assert len(saved) == len(at_save)
    for key, row in zip(at_save, saved.pull(np.array(list(at_save))), strict=True):
        assert (row == at_save[key]).all()
