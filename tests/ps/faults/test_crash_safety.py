"""kill -9 between any two file operations: what was there before, or all of the new."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import CheckpointError
from ps.shard.directory import ShardDirectory
from ps.shard.ending import UNFINISHED
from ps.shard.logfile import HEAD_BYTES
from ps.shard.push import take_apart
from ps.shard.state import ShardState
from ps.table.spec import make_spec

# Kills its own process before the n-th operation on a file below a directory.
_KILLER = """
import os, signal, sys
from pathlib import Path

def kill_before(number, below):
    count = 0

    def step():
        nonlocal count
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def hook(event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
            if str(args[0]).startswith(below):
                step()

    def wrap(name):
        real = getattr(os, name)

        def call(*args):
            step()
            return real(*args)

        setattr(os, name, call)

    sys.addaudithook(hook)
    for name in ("fsync", "fdatasync", "ftruncate"):
        wrap(name)
    real = os.pwritev

    short = False

    def pwritev(file, parts, offset):  # every other write ends in its middle
        nonlocal short
        short = not short
        step()
        return real(file, [memoryview(parts[0])[:7]] if short else parts, offset)

    os.pwritev = pwritev

def forked(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -9), code
    return code == 0
"""

_SAVE = (
    _KILLER
    + """
import shutil
import numpy as np
from ps import LocalTable

root = sys.argv[1]
keys = np.arange(500)

def table(value):
    made = LocalTable.create("t", 4, initializer="zeros")
    made.push(keys, np.full((500, 4), value, np.float32), kind="assign")
    return made

seen, number, done = set(), 0, False
while not done:
    place = f"{root}/{number}/ck"
    table(1).save(place)

    def work():
        new = table(2)
        kill_before(number, place)
        new.save(place)

    done = forked(work)
    rows = LocalTable.load_checkpoint(place)["t"].pull(keys)
    assert len(np.unique(rows)) == 1, f"a mixture before operation {number}"
    seen.add(int(rows[0, 0]))
    if done:
        assert rows[0, 0] == 2
    table(3).save(place)  # what a dead save has left is in nobody's way, and goes
    assert (LocalTable.load_checkpoint(place)["t"].pull(keys) == 3).all()
    assert len([p for p in os.listdir(place) if not p.startswith(".")]) == 2, os.listdir(place)
    shutil.rmtree(f"{root}/{number}")
    number += 1
print(number, sorted(seen))
"""
)

_DURABLE = (
    _KILLER
    + """
import shutil
import numpy as np
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps.shard.directory import ShardDirectory
from ps.table.spec import make_spec
from ps.shard.commit import commit_step, stage_part
from ps.shard.push import take_apart
from ps.shard.stage import part_of
from ps.shard.state import ShardState

root, sync, stride = sys.argv[1], sys.argv[2] == "sync", int(sys.argv[3])
in_parts = sys.argv[4] == "steps"
keys = np.arange(40, dtype=np.uint64)
spec = make_spec("t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log")

def step(state, sequence):
    grads = np.full((40, 2), -0.5, np.float32)
    for slot in range(2):
        head = pb.StageRequest(series="me", step=sequence, slot=slot)
        head.tables.add(table="t", dim=2, count=40)
        stage_part(state, part_of(pack(head, keys, grads)))
    asked = pb.CommitRequest(series="me", step=sequence, slots=2, scale=1, rate=1)
    return commit_step(state, asked, None, asked.SerializeToString(), 1)

def push(state, sequence):
    if in_parts:
        return step(state, sequence)
    head = pb.PushRequest(
        table="t", dim=2, count=40, client="me", epoch=1, sequence=sequence, position=str(sequence)
    )
    grads = np.full((40, 2), -1, np.float32)
    message = pack(head, keys, grads)
    payload = memoryview(keys.tobytes() + grads.tobytes())
    return state.push(take_apart(head, payload, message), 1)

number, done = 0, False
while not done:
    place = f"{root}/{number}"
    reader, writer = os.pipe()

    def work():
        kill_before(number, place)
        state = ShardState()
        durable = ShardDirectory(state, Path(place), sync=sync)
        state.create(spec)
        os.write(writer, b"c")
        for sequence in range(1, 7):
            assert push(state, sequence)
            os.write(writer, b"p")
            if sequence % 2 == 0:
                durable.fold()

    done = forked(work)
    os.close(writer)
    acknowledged = os.read(reader, 100).decode()
    os.close(reader)

    def check():
        for again in range(2):  # what recovery has done to the log must not hurt the next one
            state = ShardState()
            durable = ShardDirectory(state, Path(place), sync=sync)
            if "c" not in acknowledged and "t" not in state.tables:
                state.create(spec)
            rows = state.tables["t"].native.pull(keys, True)
            assert len(np.unique(rows)) == 1, f"a mixture before operation {number}"
            count, sure = int(rows[0, 0]), acknowledged.count("p")
            assert sure <= count <= sure + 1, (number, count, sure)
            position = next((p.position for p in state.pushes.positions()), "0")
            assert in_parts or position == str(count), (number, position, count)
            durable.close()
        state = ShardState()
        durable = ShardDirectory(state, Path(place), sync=sync)
        if "t" not in state.tables:
            state.create(spec)
        for sequence in range(1, 8):  # the client does not know either: it sends all again
            assert push(state, sequence) == (sequence > count), (number, sequence, count)
        assert (state.tables["t"].native.pull(keys, True) == 7).all()

    assert forked(check)
    shutil.rmtree(place, ignore_errors=True)
    number += stride
print(number)
"""
)


def _run(script: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split(maxsplit=1)


def test_a_save_that_is_killed_anywhere(tmp_path: Path) -> None:
    operations, seen = _run(_SAVE, str(tmp_path))
    assert int(operations) > 10
    assert seen.strip() == "[1, 2]"  # killed before, and after, the one step that counts


@pytest.mark.parametrize(
    ("what", "stride"),
    [
        ("pushes", 5),
        ("steps", 13),
        *(pytest.param(what, 1, marks=pytest.mark.exhaustive) for what in ("pushes", "steps")),
    ],
)
@pytest.mark.parametrize("sync", ["sync", "lazy"])
def test_a_shard_that_is_killed_anywhere_loses_nothing_acknowledged(
    tmp_path: Path, what: str, sync: str, stride: int
) -> None:
    """Killed before every `stride`-th operation; steps have two parts, and then their commit."""
    (operations,) = _run(_DURABLE, str(tmp_path), sync, str(stride), what)
    assert int(operations) > 60


SPEC = make_spec("t", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log")


def _push(state: ShardState, sequence: int) -> bool:
    head = pb.PushRequest(table="t", dim=1, count=1, client="me", epoch=1, sequence=sequence)
    body = np.uint64([3]).tobytes() + np.float32([-1]).tobytes()
    message = pack(head, body)
    return state.push(take_apart(head, memoryview(body), message), 1)


def _value(state: ShardState) -> float:
    return float(state.tables["t"].native.pull(np.uint64([3]), True)[0, 0])


def test_a_torn_log_is_good_up_to_its_last_whole_record(tmp_path: Path) -> None:
    state = ShardState()
    durable = ShardDirectory(state, tmp_path / "full")
    state.create(SPEC)
    sizes = []
    for sequence in (1, 2, 3):
        reached = (tmp_path / "full" / ".shard").read_bytes()  # the last push is not acknowledged
        assert _push(state, sequence)
        sizes.append(durable.log.bytes)
    durable.close()
    marked = sizes[2] - HEAD_BYTES  # the record is whole without its mark, and taken
    for end in range(sizes[1], sizes[2] + 1):
        place = tmp_path / str(end)
        shutil.copytree(tmp_path / "full", place)
        with (place / "log-00000001").open("r+b") as log:
            log.truncate(end)
        (place / ".shard").write_bytes(reached)
        whole = end >= marked
        for applied in (not whole, False):  # again: the tail was cut off, not left in the way
            state = ShardState()
            durable = ShardDirectory(state, place)
            assert _value(state) == (2 if applied else 3)
            assert _push(state, 3) == applied
            assert _value(state) == 3
            durable.close()


def test_a_log_that_is_damaged_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    state = ShardState()
    durable = ShardDirectory(state, tmp_path)
    state.create(SPEC)
    _push(state, 1)
    _push(state, 2)
    durable.log.rotate([])
    _push(state, 3)
    durable.close()
    first = tmp_path / "log-00000001"
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"log-00000001: damaged at byte .*1 push whole records"
    ):
        ShardDirectory(ShardState(), tmp_path)


# Pushes of new keys, a byte to standard output for each that is acknowledged, until memory ends.
_EXHAUSTED = """
import os, resource, sys
import numpy as np
from pathlib import Path
from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps.shard.directory import ShardDirectory
from ps.shard.push import take_apart
from ps.shard.state import ShardState
from ps.table.spec import make_spec

state = ShardState()
durable = ShardDirectory(state, Path(sys.argv[1]))
state.create(
    make_spec("t", 64, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log")
)
messages = []
for sequence in range(1, 100):
    keys = np.random.default_rng(sequence).choice(50_000, 1000, replace=False).astype(np.uint64)
    head = pb.PushRequest(table="t", dim=64, count=1000, client="me", epoch=1, sequence=sequence)
    body = keys.tobytes() + np.full((1000, 64), -1, np.float32).tobytes()
    messages.append(take_apart(head, memoryview(body), pack(head, body)))
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 18),) * 2)
for push in messages:
    state.push(push, 1)
    os.write(1, b"p")
"""


@pytest.mark.parametrize(
    "left", [9, *(pytest.param(left, marks=pytest.mark.exhaustive) for left in range(1, 9))]
)
def test_memory_that_runs_out_leaves_no_push_half_applied(tmp_path: Path, left: int) -> None:
    """The shard ends, and comes back with what was acknowledged, and perhaps the one after it.

    Args:
        left: quarters of a MiB.
    """
    command = [sys.executable, "-c", _EXHAUSTED, str(tmp_path), str(left)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == UNFINISHED, done.stderr[-3000:]
    state = ShardState()
    ShardDirectory(state, tmp_path).close()
    found = state.tables["t"].native.pull(np.arange(50_000, dtype=np.uint64), True)
    counts = np.zeros(50_000)
    for sequence in range(1, len(done.stdout) + 2):
        if sequence == len(done.stdout) + 1 and found.sum() == 64 * counts.sum():
            break
        counts[np.random.default_rng(sequence).choice(50_000, 1000, replace=False)] += 1
    np.testing.assert_array_equal(found, np.repeat(counts[:, None], 64, 1))
