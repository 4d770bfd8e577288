"""Memory that clients and shards of one host share, and what is left of it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps import LocalShards, ParameterClient
from ps.shm.region import Region
from tests.pids import stop
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
CLIENT = """
import sys
import numpy as np
from ps import ParameterClient

client = ParameterClient(sys.argv[1:])
keys = np.arange(20_000)
kept = []
client.spec("t")
print("ready", flush=True)
sys.stdin.readline()
for i in range(1_000_000):
    client.push("t", keys, np.full((20_000, 4), -1, np.float32))
    kept = [*kept[-2:], client.pull("t", keys)]
    print("pushed", flush=True)
"""


def _files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _shares(pid: int) -> bool:
    return "memfd:heterps-" in Path(f"/proc/{pid}/maps").read_text()


def _started(shards: LocalShards) -> subprocess.Popen[str]:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *shards.addresses],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    return client


def _begin(client: subprocess.Popen[str]) -> None:
    assert client.stdin is not None
    client.stdin.write("\n")
    client.stdin.flush()


def _kill(client: subprocess.Popen[str]) -> None:
    client.send_signal(signal.SIGKILL)
    client.communicate()


@pytest.fixture
def filled() -> Iterator[LocalShards]:
    with LocalShards(2) as shards, ParameterClient(shards.addresses, shared_memory=False) as ours:
        ours.create_table("t", 4, optimizer="sgd", learning_rate=1.0, initializer="zeros")
        yield shards


def test_killed_clients_leave_nothing(filled: LocalShards) -> None:
    before = _files()
    clients = [_started(filled) for _ in range(2)]
    for pushes, client in enumerate(clients):
        _begin(client)
        assert client.stdout is not None
        for _ in range(1 + 5 * pushes):
            assert client.stdout.readline() == "pushed\n"
    assert all(_shares(shard.pid) for shard in filled.processes)
    for client in clients:
        _kill(client)
    wait_until(lambda: not any(_shares(s.pid) for s in filled.processes), "the shards let go")
    assert _files() <= before


def test_a_client_that_is_killed_as_it_shares_memory_leaves_nothing(filled: LocalShards) -> None:
    """The shards are stopped, so it is in the middle of that."""
    before = _files()
    client = _started(filled)
    for shard in filled.processes:
        stop(shard.pid)
    try:
        _begin(client)
        wait_until(lambda: _shares(client.pid), "it has made the memory")
        _kill(client)
    finally:
        for shard in filled.processes:
            os.kill(shard.pid, signal.SIGCONT)
    assert _files() <= before
    with ParameterClient(filled.addresses) as other:
        assert other.pull("t", [1]).shape == (1, 4)
        wait_until(lambda: all(_shares(s.pid) for s in filled.processes), "others share theirs")


def test_memory_without_a_name_that_the_system_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages go another way then."""
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(OSError, match="Linux"):
        Region(100)
    with LocalShards(1) as shards, ParameterClient(shards.addresses) as client:
        client.create_table("t", 1, optimizer="sgd", initializer="zeros")
        client.push("t", [1], [[1.0]])
        assert client.pull("t", [1]).shape == (1, 1)
