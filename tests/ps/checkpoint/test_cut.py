"""A checkpoint is one cut of all shards, while clients go on pushing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ps import LocalShards, LocalTable, ParameterClient
from ps.checkpoint.manifest import Manifest
from ps.checkpoint.tables import read_checkpoint
from ps.client.hold import Hold
from ps.engine import _native
from ps.errors import CheckpointError
from ps.table.buckets import default_route

SHARDS = 3
DIM = 2


def _one_key_a_shard(first: int, shards: int = SHARDS) -> list[int]:
    """Keys from `first` on, one that lies on each shard."""
    keys: dict[int, int] = {}
    route = default_route(shards)
    for key in range(first, first + 10_000):
        keys.setdefault(int(route[_native.buckets_of(np.uint64([key]))[0]]), key)
        if len(keys) == shards:
            return [keys[s] for s in range(shards)]
    raise AssertionError


def _make(client: ParameterClient) -> None:
    for name in ("t", "u"):
        client.create_table(name, DIM, optimizer="sgd", learning_rate=1.0, initializer="zeros")


class Pusher(threading.Thread):
    """Pushes to one key on every shard, of one table, and then as often of another.

    Its position says how many pushes to the first table there were.
    """

    def __init__(self, addresses: list[str], number: int, pipelined: bool) -> None:
        super().__init__(daemon=True)
        self.name_ = f"pusher-{number}"
        self.keys = _one_key_a_shard(1_000_000 * (number + 1))
        self.slowest_s = 0.0
        self.pushed = 0
        self.error: BaseException | None = None
        self._addresses = addresses
        self._pipelined = pipelined
        self._ended = threading.Event()

    def run(self) -> None:
        grads = np.full((SHARDS, DIM), -1, np.float32)
        try:
            with ParameterClient(
                self._addresses, client_id=self.name_, shared_memory=False
            ) as client:
                while not self._ended.is_set():
                    began = time.monotonic()
                    futures = [
                        client.push_async("t", self.keys, grads, position=str(self.pushed + 1)),
                        client.push_async("u", self.keys, grads),
                    ]
                    self.pushed += 1
                    if not self._pipelined or self.pushed % 8 == 0:
                        for future in futures:
                            future.result()
                        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._ended.set()
        self.join(60)
        assert not self.is_alive()
        assert self.error is None, self.error


def _counts(place: Path, pushers: list[Pusher]) -> tuple[dict[str, int], Manifest]:
    """How often each pusher has pushed, after every push was found whole."""
    tables = LocalTable.load_checkpoint(place)
    found = {}
    for pusher in pushers:
        for name in ("t", "u"):
            rows = tables[name].pull(pusher.keys)
            assert len(np.unique(rows)) == 1, f"{place}: half a push in {name}: {rows}"
        t, u = (int(tables[n].pull(pusher.keys)[0, 0]) for n in ("t", "u"))
        if not pusher._pipelined:
            assert abs(t - u) <= 1
        found[pusher.name_] = t
    return found, read_checkpoint(place)


def test_of_every_push_a_checkpoint_has_all_or_nothing(tmp_path: Path) -> None:
    with LocalShards(SHARDS) as shards, ParameterClient(shards.addresses) as client:
        _make(client)
        pushers = [Pusher(shards.addresses, n, pipelined=n > 1) for n in range(4)]
        for pusher in pushers:
            pusher.start()
        try:
            for i in range(12):
                client.save(tmp_path / f"ck{i}")
        finally:
            for pusher in pushers:
                pusher.end()
        client.save(tmp_path / "ck12")
    before = {p.name_: 0 for p in pushers}
    for i in range(13):
        counts, manifest = _counts(tmp_path / f"ck{i}", pushers)
        assert manifest.torn == 0
        assert {c: int(p) for c, p in manifest.positions.items()} == {
            c: n for c, n in counts.items() if n
        }
        assert all(counts[c] >= before[c] for c in counts)
        before = counts
    assert before == {p.name_: p.pushed for p in pushers}
    # No push waited for a save to be written, let alone for a hold to run out.
    assert max(p.slowest_s for p in pushers) < 10


def test_two_saves_at_a_time_follow_each_other(tmp_path: Path) -> None:
    with LocalShards(2) as shards:
        with ParameterClient(shards.addresses) as client:
            _make(client)
            client.push("t", np.arange(5000), np.ones((5000, DIM), np.float32))
        errors: list[BaseException] = []

        def save(number: int) -> None:
            try:
                with ParameterClient(shards.addresses) as mine:
                    for i in range(4):
                        mine.save(tmp_path / f"ck{number}-{i}")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=save, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not errors, errors
    assert len([p for p in tmp_path.iterdir() if LocalTable.load_checkpoint(p)]) == 12


# Sends only the first of its push's messages, then waits to be killed.
_TORN = """
import sys, time
from functools import partial
from ps import ParameterClient
from ps.client.push import Push
import numpy as np

def run(self):
    self._deliver(self._messages[0])
    print("half", flush=True)
    time.sleep(600)

client = ParameterClient(sys.argv[1].split(","), client_id="doomed")
keys = [int(k) for k in sys.argv[2].split(",")]
client.push("t", keys, np.full((len(keys), 2), -1, np.float32))
Push.run = run
client.push("t", keys, np.full((len(keys), 2), -1, np.float32))
"""


def test_a_client_that_dies_in_the_middle_of_a_push_is_counted(tmp_path: Path) -> None:
    keys = _one_key_a_shard(5)
    with LocalShards(SHARDS) as shards, ParameterClient(shards.addresses) as client:
        _make(client)
        with subprocess.Popen(
            [sys.executable, "-c", _TORN, ",".join(shards.addresses), ",".join(map(str, keys))],
            stdout=subprocess.PIPE,
            text=True,
        ) as doomed:
            assert doomed.stdout is not None
            assert doomed.stdout.readline() == "half\n"
            os.kill(doomed.pid, signal.SIGKILL)
        pusher = Pusher(shards.addresses, 1, pipelined=False)
        pusher.start()
        try:
            client.save(tmp_path / "first")
            client.save(tmp_path / "second")
        finally:
            pusher.end()
        assert read_checkpoint(tmp_path / "first").torn == SHARDS - 1
        assert read_checkpoint(tmp_path / "second").torn == 0  # not waited for again
        _counts(tmp_path / "second", [pusher])
        rows = LocalTable.load_checkpoint(tmp_path / "first")["t"].pull(keys)
        assert rows[:, 0].tolist() == [2, 1, 1]
        assert pusher.slowest_s < 10


def test_a_save_whose_client_dies_holds_nobody_back_for_ever(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from ps import ParameterClient\nfrom ps.client import hold\n"
        "import time\n"
        "def stay(*args):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
        "hold._unfinished = stay\n"
        "ParameterClient(sys.argv[1].split(',')).save(sys.argv[2])\n"
    )
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=30) as client:
        _make(client)
        with subprocess.Popen(
            [sys.executable, "-c", script, ",".join(shards.addresses), str(tmp_path / "dead")],
            stdout=subprocess.PIPE,
            text=True,
        ) as doomed:
            assert doomed.stdout is not None
            assert doomed.stdout.readline() == "held\n"
            os.kill(doomed.pid, signal.SIGKILL)
        client.push("t", [1], np.ones((1, DIM), np.float32))
        client.save(tmp_path / "ck")
        assert json.loads((tmp_path / "ck" / "manifest.json").read_text())["torn"] == 0
        assert not (tmp_path / "dead").exists()


# Has its turn for a minute, perhaps holds pushes back, and waits to be killed.
_TURN = """
import sys, time
from ps import ParameterClient
from ps.client import hold

hold._HOLD_S = 60.0
client = ParameterClient(sys.argv[1].split(","))
turn = hold.Hold(client.session(), time.monotonic() + 60)
if sys.argv[2] == "pushes":
    turn.hold_pushes()
time.sleep(3 * hold._RENEW_S)
print("turn", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("held", ["pushes", "nothing"])
def test_nobody_waits_for_the_turn_of_one_who_died(tmp_path: Path, held: str) -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses, timeout_s=30) as client:
        _make(client)
        with subprocess.Popen(
            [sys.executable, "-c", _TURN, ",".join(shards.addresses), held],
            stdout=subprocess.PIPE,
            text=True,
        ) as doomed:
            assert doomed.stdout is not None
            assert doomed.stdout.readline() == "turn\n"
            with pytest.raises(CheckpointError, match="busy with another save"):
                client.save(tmp_path / "early", timeout_s=0.1)
            os.kill(doomed.pid, signal.SIGKILL)
        client.push("t", [1], np.ones((1, DIM), np.float32))
        client.save(tmp_path / "ck", timeout_s=30)
        client.load(tmp_path / "ck", timeout_s=30)


def test_a_turn_lasts_while_its_holder_lives(tmp_path: Path) -> None:
    with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
        _make(client)
        with ParameterClient(shards.addresses) as other:
            hold = Hold(other.session(), time.monotonic() + 60)
            with pytest.raises(CheckpointError, match="busy with another save"):
                client.save(tmp_path / "early", timeout_s=5)
            hold.hold_pushes()
            hold.abandon()
        client.save(tmp_path / "ck")


def test_pushes_that_wait_for_a_cut_leave_the_shard_able_to_take_it(tmp_path: Path) -> None:
    """Far more pushes at once than a shard, or a client, has threads."""
    keys = np.arange(64)
    grads = np.full((64, DIM), -1, np.float32)
    with (
        LocalShards(2, options=("--threads", "4")) as shards,
        ParameterClient(shards.addresses) as client,
        ParameterClient(shards.addresses) as other,
    ):
        _make(client)
        futures = []
        for i in range(6):
            for each in (client, other):
                futures += [each.push_async("t", keys, grads) for _ in range(30)]
            saving = threading.Thread(target=other.save, args=(tmp_path / f"ck{i}",))
            saving.start()
            futures += [client.push_async("t", keys, grads) for _ in range(30)]
            saving.join(60)
            assert not saving.is_alive()
        for future in futures:
            future.result(60)
        assert (client.pull("t", keys) == 6 * 90).all()
    for i in range(6):
        assert len(np.unique(LocalTable.load_checkpoint(tmp_path / f"ck{i}")["t"].pull(keys))) == 1
        assert read_checkpoint(tmp_path / f"ck{i}").torn == 0


@pytest.mark.parametrize("mode", ["delta", "checkpoint"])
def test_since_and_mode_go_together(tmp_path: Path, mode: str, client: ParameterClient) -> None:
    since = tmp_path / "x" if mode == "checkpoint" else None
    with pytest.raises(ValueError, match="expected one for delta only"):
        client.save(tmp_path / "ck", mode=mode, since=since)
