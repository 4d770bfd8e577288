"""Power fails: what was acknowledged with --sync, and what was saved, is there afterwards.

What processes do to their files is recorded, and the power fails after each event of the record in
turn; `tests/power/disk.py` says what a disk keeps then.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ps import CheckpointError, LocalShards, LocalTable
from ps.shard.directory import ShardDirectory
from ps.shard.state import ShardState
from tests.power.disk import ACKNOWLEDGED, BEGUN, Disk, Event, Recorder

KEYS = np.arange(20, dtype=np.uint64)
SAVED = 1 << 32  # notes from here on are of saves

# A shard's directory in a process of its own, without a server: pushes, folds, saves.
_ALONE = """
import os, sys
from pathlib import Path

import numpy as np

from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import LocalTable
from ps.shard.directory import ShardDirectory
from ps.shard.push import take_apart
from ps.shard.state import ShardState
from ps.table.spec import make_spec
from tests.power.disk import note

root, log, count = sys.argv[1], os.environ["HETERPS_POWER_LOG"], int(sys.argv[2])
sync = sys.argv[3] == "sync"
keys = np.arange(20, dtype=np.uint64)
state = ShardState()
durable = ShardDirectory(state, Path(root) / "data" / "shard-0", sync=sync)
state.create(
    make_spec("t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log")
)
saved = LocalTable.create("t", 2, initializer="zeros")
for number in range(1, count + 1):
    note(log, "B", number)
    head = pb.PushRequest(table="t", dim=2, count=20, client="me", epoch=1, sequence=number)
    grads = np.full((20, 2), -1, np.float32)
    payload = keys.tobytes() + grads.tobytes()
    state.push(take_apart(head, memoryview(payload), pack(head, keys, grads)), 1)
    note(log, "A", number)
    if number % 3 == 0:
        durable.fold()
        saved.push(keys, np.full((20, 2), number, np.float32), kind="assign")
        saved.save(Path(root) / "saved")
        note(log, "A", (1 << 32) + number)
"""

# A client of real shards.
_CLIENT = """
import os, sys

import numpy as np

from ps import ParameterClient
from tests.power.disk import note

root, log, count = sys.argv[1], os.environ["HETERPS_POWER_LOG"], int(sys.argv[2])
keys = np.arange(20)
options = dict(optimizer="sgd", learning_rate=1.0, initializer="zeros")
with ParameterClient(sys.argv[3:], timeout_s=60) as client:
    client.create_table("t", 2, durability="log", **options)
    client.create_table("folds", 2, durability="checkpoint", **options)
    for number in range(1, count + 1):
        note(log, "B", number)
        client.push("t", keys, np.full((20, 2), -1, np.float32))
        note(log, "A", number)
        client.push("folds", keys, np.full((20, 2), -1, np.float32))
        if number % 10 == 0:
            client.save(root + "/saved")
            note(log, "A", (1 << 32) + number)
"""


def _run(recorder: Recorder, script: str, *arguments: str) -> None:
    command = [sys.executable, "-c", script, str(recorder.root), *arguments]
    environment = os.environ | recorder.environment
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def _losses(
    recorder: Recorder, to: Path, stride: int, ways: int
) -> Iterator[tuple[Path, Counter[str]]]:
    """What is left where power fails after every `stride`-th event, and the newest notes."""
    disk, chance = Disk(recorder.root), random.Random(1)
    notes = Counter[str]()
    events = recorder.events()
    assert len(events) > 50
    for index, event in enumerate(events):
        disk.take(event)
        _take_note(notes, event)
        for way in range(ways if index % stride == 0 or index + 1 == len(events) else 0):
            left = to / f"{index}-{way}"
            disk.lose_power(left, chance)
            yield left, notes


def _take_note(notes: Counter[str], event: Event) -> None:
    if event.kind in (BEGUN, ACKNOWLEDGED):
        name = "saved" if event.at >= SAVED else event.kind
        notes[name] = max(notes[name], event.at % SAVED)


def _count(folder: Path) -> int:
    """How many pushes a shard brings back from a directory; each is whole."""
    state = ShardState()
    durable = ShardDirectory(state, folder, sync=True)
    try:
        rows = state.tables["t"].native.pull(KEYS, True) if "t" in state.tables else np.zeros(1)
        assert len(np.unique(rows)) == 1, "a push is half there"
        return int(rows.flat[0])
    finally:
        durable.close()


def _saved(place: Path) -> int:
    """The newest push in a save; -1 where none loads."""
    try:
        rows = LocalTable.load_checkpoint(place)["t"].pull(KEYS)
    except CheckpointError:
        return -1
    assert len(np.unique(rows)) == 1
    return int(rows.flat[0])


@pytest.mark.parametrize(
    ("stride", "ways"), [(6, 1), pytest.param(1, 5, marks=pytest.mark.exhaustive)]
)
def test_what_was_synced_is_there(tmp_path: Path, stride: int, ways: int) -> None:
    recorder = Recorder(tmp_path / "root", tmp_path)
    _run(recorder, _ALONE, "13" if stride == 1 else "7", "sync")
    (tmp_path / "left").mkdir()
    for left, notes in _losses(recorder, tmp_path / "left", stride, ways):
        found = _count(left / "data" / "shard-0")
        assert notes[ACKNOWLEDGED] <= found <= notes[BEGUN], left
        assert _saved(left / "saved") >= (notes["saved"] or -1), left


@pytest.mark.exhaustive
def test_what_was_not_synced_is_missed(tmp_path: Path) -> None:
    """That the test can fail: without --sync, acknowledged pushes go."""
    recorder = Recorder(tmp_path / "root", tmp_path)
    _run(recorder, _ALONE, "5", "lazy")
    (tmp_path / "left").mkdir()
    lost = 0
    for left, notes in _losses(recorder, tmp_path / "left", 3, 1):
        try:
            lost += _count(left / "data" / "shard-0") < notes[ACKNOWLEDGED]
        except CheckpointError:
            lost += 1
    assert lost > 3


@pytest.mark.exhaustive
def test_what_shards_acknowledge_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real shards that fold and are saved while clients push."""
    recorder = Recorder(tmp_path / "root", tmp_path)
    for name, value in recorder.environment.items():
        monkeypatch.setenv(name, value)
    with LocalShards(1, data=recorder.root / "data", options=("--sync", "--fold", "0.2")) as shards:
        monkeypatch.undo()
        _run(recorder, _CLIENT, "300", *shards.addresses)
    (tmp_path / "left").mkdir()
    for left, notes in _losses(recorder, tmp_path / "left", 5, 2):
        assert _count(left / "data" / "shard-0") >= notes[ACKNOWLEDGED], left
        assert _saved(left / "saved") >= (notes["saved"] or -1), left
