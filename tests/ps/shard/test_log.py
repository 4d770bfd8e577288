"""Damaged logs: all that was acknowledged comes back, or nothing does without a word."""

import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chassis.exits import DAMAGED
from protos import parameter_server_pb2 as pb
from protos.codec import pack, payload_prefix
from ps.errors import CheckpointError, DamageError
from ps.shard import logfile
from ps.shard.commit import commit_step, stage_part
from ps.shard.directory import ShardDirectory
from ps.shard.journal import BehindError, Place, nowhere
from ps.shard.logfile import HEAD_BYTES, HEADER_BYTES, LogFile
from ps.shard.push import take_apart
from ps.shard.replica import Standby
from ps.shard.stage import part_of
from ps.shard.state import ShardState
from ps.table.spec import make_spec

KEYS = np.arange(50, dtype=np.uint64)
SPEC = make_spec("t", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros", durability="log")


def push(state: ShardState, sequence: int, keys: NDArray[np.uint64], value: float = -1.0) -> bool:
    """A push as it comes over the wire, to table `t`."""
    head = pb.PushRequest(
        table="t", dim=1, count=len(keys), client="me", epoch=1, sequence=sequence
    )
    body = keys.tobytes() + np.full(len(keys), value, np.float32).tobytes()
    message = pack(head, body)
    return state.push(take_apart(head, memoryview(body), message), 1)


def rows(state: ShardState) -> list[int]:
    """What each key has come to; all zeros where there is no table yet."""
    if "t" not in state.tables:
        return [0] * len(KEYS)
    return [int(value) for value in state.tables["t"].native.pull(KEYS, True)[:, 0]]


@dataclass(frozen=True)
class Made:
    """A shard's directory, and what each key had come to after each push to it."""

    directory: Path
    after: list[list[int]]
    files: list[Path]


def make(directory: Path, *, sync: bool, folds: int, rotations: int) -> Made:
    """Pushes of random keys, counted beside the shard."""
    rng = np.random.default_rng(folds + 10 * rotations)
    state = ShardState()
    durable = ShardDirectory(state, directory, sync=sync)
    state.create(SPEC)
    counts: Counter[int] = Counter()
    after = [[0] * len(KEYS)]
    for sequence in range(1, 25):
        keys = rng.choice(KEYS, rng.integers(1, 20), replace=False)
        assert push(state, sequence, keys)
        counts.update(int(key) for key in keys)
        after.append([counts[int(key)] for key in KEYS])
        if folds and sequence == 8:
            durable.fold()
        if sequence <= 8 + 4 * rotations and sequence > 8 and sequence % 4 == 0:
            durable.log.rotate([("state", 1, state.summary(windows=False).SerializeToString())])
    durable.close()
    return Made(directory, after, [path for path, _ in logfile.paths(directory)])


@pytest.fixture(scope="module", params=["lazy", "sync"])
def made(request: pytest.FixtureRequest) -> Iterator[list[Made]]:
    """One file, three, and some after a base; in memory, as each is copied often."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    sync = request.param == "sync"
    with tempfile.TemporaryDirectory(dir=memory) as root:
        yield [
            make(Path(root, str(number)), sync=sync, folds=folds, rotations=rotations)
            for number, (folds, rotations) in enumerate([(0, 0), (0, 2), (1, 0), (1, 2)])
        ]


def start(directory: Path, *, accept_loss: bool = False) -> list[int]:
    """The rows with which a shard starts."""
    state = ShardState()
    durable = ShardDirectory(state, directory, accept_loss=accept_loss)
    durable.close()
    return rows(state)


def heads_of(path: Path) -> list[tuple[int, int]]:
    """Where each frame of a file begins, and where its body, or a mark, ends."""
    data, found, at = path.read_bytes(), [], HEADER_BYTES
    while at < len(data):
        size = int.from_bytes(data[at + 24 : at + 32], "little")
        end = at + HEAD_BYTES + size + logfile.padding_of(size)
        found.append((at, end))
        at = end
    return found


@st.composite
def places(draw: st.DrawFn, path: Path) -> int:
    """A byte: of the header, of a head, of a body, of the last mark."""
    frames = heads_of(path)
    region = draw(st.sampled_from(["header", "head", "body", "last"]))
    if region == "header":
        return draw(st.integers(0, HEADER_BYTES - 1))
    if region == "last":
        return draw(st.integers(frames[-1][0], frames[-1][1] - 1))
    bodies = [(at, end) for at, end in frames if end > at + HEAD_BYTES]
    at, end = draw(st.sampled_from(frames if region == "head" else bodies))
    if region == "head":
        return draw(st.integers(at, at + HEAD_BYTES - 1))
    return draw(st.integers(at + HEAD_BYTES, end - 1))


@settings(max_examples=100, derandomize=True)
@given(data=st.data())
def test_a_flipped_bit_loses_nothing_in_silence(made: list[Made], data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(made))
    path = data.draw(st.sampled_from(whole.files))
    place, bit = data.draw(places(path)), data.draw(st.integers(0, 7))
    flip(whole, path, place, bit)


@pytest.mark.exhaustive
def test_no_flipped_bit_anywhere_loses_anything_in_silence(made: list[Made]) -> None:
    """One in every ninth byte: of each field of heads and bodies some."""
    for whole in made:
        for path in whole.files:
            for place in range(0, path.stat().st_size, 9):
                flip(whole, path, place, place % 8)


def flip(whole: Made, path: Path, place: int, bit: int) -> None:
    """Start from a copy with that bit flipped."""
    directory = whole.directory.with_name("flipped")
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(whole.directory, directory)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 1 << bit
    (directory / path.name).write_bytes(damaged)
    if bit % 2:  # marks in the log tell it, too
        (directory / ".shard").write_bytes(b"")
    before = sorted(p.name for p in directory.iterdir())
    try:
        found = start(directory)
    except DamageError:
        assert sorted(p.name for p in directory.iterdir()) == before, "a refusal changes nothing"
    else:
        assert found == whole.after[-1]
        return
    found = start(directory, accept_loss=True)
    assert found in whole.after, "a state that the shard once had"
    assert (directory / f"damaged-{path.name}").read_bytes() == damaged
    assert start(directory) == found, "it starts without the option from then on"


def test_what_is_lost_is_told_and_the_shard_goes_on(
    tmp_path: Path, made: list[Made], caplog: pytest.LogCaptureFixture
) -> None:
    whole = made[1]
    directory = tmp_path / "copy"
    shutil.copytree(whole.directory, directory)
    path = directory / "log-00000001"
    frames = [(at, end) for at, end in heads_of(path) if end > at + HEAD_BYTES]
    data = bytearray(path.read_bytes())
    data[frames[5][0] + HEAD_BYTES + 20] ^= 4  # the fifth push; the table was made before
    path.write_bytes(data)
    with pytest.raises(DamageError, match=rf"damaged at byte {frames[5][0]}.* 19 push.*whole"):
        start(directory)
    assert start(directory, accept_loss=True) == whole.after[4]
    assert "--accept-loss: " in caplog.text
    assert "19 push" in caplog.text
    state = ShardState()
    durable = ShardDirectory(state, directory)
    assert not push(state, 4, KEYS)
    assert push(state, 5, KEYS), "what was given up can be pushed again"
    durable.close()
    assert start(directory) == [count + 1 for count in whole.after[4]]


@pytest.mark.parametrize("gone", ["base", "first", "middle", "last", "end of the first"])
def test_files_that_are_missing_are_missed(tmp_path: Path, made: list[Made], gone: str) -> None:
    whole = made[3] if gone in ("base", "last") else made[1]
    directory = tmp_path / "copy"
    shutil.copytree(whole.directory, directory)
    files = [path for path, _ in logfile.paths(directory)]
    if gone == "base":
        (directory / "base" / "manifest.json").unlink()
    elif gone == "last":
        for path in files:
            path.unlink()
    elif gone == "end of the first":
        with files[0].open("r+b") as stream:
            stream.truncate(heads_of(files[0])[-4][0])
    else:
        files[0 if gone == "first" else 1].unlink()
    before = sorted(directory.rglob("*"))
    with pytest.raises(DamageError, match="at byte"):
        start(directory)
    assert sorted(directory.rglob("*")) == before, "a refusal changes nothing"
    if gone == "base":
        assert start(directory, accept_loss=True) == whole.after[0]
        assert list((directory / "damaged-base").glob("save-*/*.rows")), "it may be mended yet"


@pytest.mark.parametrize(
    "left", ["nothing", "no bytes", "half a header", "a header", "some", "most"]
)
def test_the_newest_file_is_missed_where_its_end_is(
    tmp_path: Path, made: list[Made], left: str
) -> None:
    for number, whole in enumerate(made):
        directory = tmp_path / str(number)
        shutil.copytree(whole.directory, directory)
        path = logfile.paths(directory)[-1][0]
        frames = [frame for frame in heads_of(path) if frame[1] > frame[0] + HEAD_BYTES]
        ends = {"no bytes": 0, "half a header": 9, "a header": HEADER_BYTES, "some": frames[0][1]}
        if left == "nothing":
            path.unlink()
        else:
            with path.open("r+b") as stream:
                stream.truncate(ends.get(left, frames[-1][1] - 1))
        with pytest.raises(DamageError, match=f"{path.name}: .*at byte"):
            start(directory)
        found = start(directory, accept_loss=True)
        assert found in whole.after[:-1]
        assert start(directory) == found


def test_a_directory_is_one_shards_alone(tmp_path: Path) -> None:
    """A second one would go on from what it finds, and the first one's later changes would go."""
    state = ShardState()
    durable = ShardDirectory(state, tmp_path)
    state.create(SPEC)
    assert push(state, 1, KEYS)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="another process has it"):
        start(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    assert push(state, 2, KEYS)
    durable.close()
    assert start(tmp_path) == [2] * len(KEYS)


def frames_of(salt: int, *frames: tuple[bytes, bool]) -> bytes:
    """Records, each with a mark behind it or not, as a log that waits for the disk writes them."""
    data, safe = b"", HEADER_BYTES
    for text, marked in frames:
        body = payload_prefix(pb.LogRecord(kind="push"), len(text)) + text
        at = HEADER_BYTES + len(data)
        data += logfile.pack_head(salt, at, safe, len(body), crc32(body)) + body
        data += bytes(logfile.padding_of(len(body)))
        if marked:
            safe = HEADER_BYTES + len(data)
            data += logfile.pack_head(salt, safe, safe)
    return data


@pytest.mark.parametrize("place", range(4))
def test_what_was_not_on_the_disk_may_be_torn_anywhere(tmp_path: Path, place: int) -> None:
    """After a loss of power the tail has holes: pages reach the disk in any order."""
    header = logfile.new_header(1, 0)
    names = [b"one", b"two", b"three", b"four"]
    marked = [True, True, False, False]
    data = bytearray(header.pack() + frames_of(header.salt, *zip(names, marked, strict=True)))
    at = data.index(names[place])
    data[at : at + 3] = bytes(3)
    path = tmp_path / "log-00000001"
    path.write_bytes(data)
    file, found = LogFile(path, 1), []
    if place < 2:
        with pytest.raises(logfile.DamagedFileError):
            found.extend(bytes(payload) for _, payload in file.records(None))
    else:
        found.extend(bytes(payload) for _, payload in file.records(None))
    assert found == names[:place] if place < 2 else names[:place]


def test_a_shard_says_by_its_exit_code_that_it_refuses(tmp_path: Path) -> None:
    directory = make(tmp_path / "made", sync=False, folds=0, rotations=0).directory
    path = directory / "log-00000001"
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 50] ^= 1
    path.write_bytes(data)
    command = [sys.executable, "-m", "ps.server", "--data", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == DAMAGED
    assert "--accept-loss" in done.stderr


class ToReplica:
    """A journal that hands each change to a replica in this process, in its order."""

    def __init__(self, state: ShardState) -> None:
        self._standby = Standby(state)
        self._standby.absorb(pb.StateBlock(reset=True, of="primary"), iter(()))
        self._lock = threading.Lock()
        self._number = 0

    def append(self, kind: str, time_s: int, payload: bytes, place: Place = nowhere) -> None:
        with self._lock:
            self._number += 1
            record = pb.LogRecord(kind=kind, time_s=time_s, of="primary", number=self._number)
            self._standby.replicate(pack(record, bytes(payload)))
            place()

    def fall_behind(self) -> None:
        raise AssertionError

    def renew(self, *, closed: bool = False, behind: bool = False) -> None:
        raise AssertionError


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("journal", ["log", "log with --sync", "replica"])
@pytest.mark.parametrize("size", [3, 300, 20_000])
def test_rows_see_pushes_in_the_order_of_their_journal(
    tmp_path: Path, journal: str, size: int
) -> None:
    """What several clients push to the same rows at once comes back to the bit: with momentum no
    two of their gradients can change places."""
    durability = journal.split(maxsplit=1)[0]
    state, replica = ShardState(), ShardState()
    if durability == "log":
        durable = ShardDirectory(state, tmp_path, sync="sync" in journal)
    else:
        state.journals["replica"] = ToReplica(replica)
    spec = make_spec(
        "t", 1, optimizer="momentum", momentum=0.99, initializer="zeros", durability=durability
    )
    state.create(spec)
    keys = np.arange(size, dtype=np.uint64)
    rounds = 40 if size < 1000 else 10

    def work(client: int) -> None:
        for number in range(rounds):
            push(state, 1000 * client + number + 1, keys, 1.1**number * 1.3**client)

    threads = [threading.Thread(target=work, args=(client,)) for client in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live = state.tables["t"].native.pull(keys, True)
    assert len(np.unique(live)) == 1
    if durability == "log":
        durable.close()
        ShardDirectory(replica, tmp_path).close()
    np.testing.assert_array_equal(replica.tables["t"].native.pull(keys, True), live)


@pytest.mark.usefixtures("hurried")
def test_rows_see_steps_and_pushes_in_the_order_of_each_journal(tmp_path: Path) -> None:
    """Steps that touch tables of two journals, beside pushes to each of them."""
    state, replica, again = ShardState(), ShardState(), ShardState()
    durable = ShardDirectory(state, tmp_path)
    state.journals["replica"] = ToReplica(replica)
    keys = np.arange(200, dtype=np.uint64)
    names = ("log", "replica")
    for name in names:
        rule = {"optimizer": "momentum", "momentum": 0.99, "initializer": "zeros"}
        state.create(make_spec(name, 1, durability=name, **rule))

    def commit(series: int) -> None:
        for step in range(30):
            head = pb.StageRequest(series=f"s{series}", step=step)
            order = names if series % 2 else names[::-1]
            for name in order:
                head.tables.add(table=name, dim=1, count=len(keys))
            value = np.full((len(keys), 1), 1.1**step * 1.3**series, np.float32)
            stage_part(state, part_of(pack(head, keys, value, keys, value)))
            asked = pb.CommitRequest(series=f"s{series}", step=step, slots=1, scale=1, rate=1)
            assert commit_step(state, asked, None, asked.SerializeToString(), 1)

    def pushes(client: int) -> None:
        for number in range(60):
            name = names[number % 2]
            head = pb.PushRequest(table=name, dim=1, count=len(keys), client=f"c{client}")
            head.epoch, head.sequence = 1, number + 1
            body = keys.tobytes() + np.full(len(keys), 1.05**number, np.float32).tobytes()
            push_of = take_apart(head, memoryview(body), pack(head, body))
            assert state.push(push_of, 1)

    threads = [
        threading.Thread(target=work, args=(i,)) for work in (commit, pushes) for i in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live = {name: state.tables[name].native.pull(keys, True) for name in names}
    assert all(len(np.unique(rows)) == 1 for rows in live.values())
    durable.close()
    ShardDirectory(again, tmp_path).close()
    np.testing.assert_array_equal(again.tables["log"].native.pull(keys, True), live["log"])
    np.testing.assert_array_equal(
        replica.tables["replica"].native.pull(keys, True), live["replica"]
    )


class Refusing(ToReplica):
    """A replica that lacks changes, once."""

    def __init__(self, state: ShardState, primary: ShardState) -> None:
        super().__init__(state)
        self._primary = primary
        self.behind = False

    def append(self, kind: str, time_s: int, payload: bytes, place: Place = nowhere) -> None:
        if self.behind:
            raise BehindError
        super().append(kind, time_s, payload, place)

    def renew(self, *, closed: bool = False, behind: bool = False) -> None:
        self.behind = False


def test_a_step_that_one_journal_took_and_another_did_not_is_made_once(tmp_path: Path) -> None:
    """It is refused, made when it comes again, and comes back where it was made."""
    state, again = ShardState(), ShardState()
    durable = ShardDirectory(state, tmp_path)
    journal = Refusing(ShardState(), state)
    state.journals["replica"] = journal
    keys = np.arange(10, dtype=np.uint64)
    for name in ("log", "replica"):
        state.create(make_spec(name, 1, optimizer="sgd", initializer="zeros", durability=name))
    head = pb.StageRequest(series="s")
    for name in ("log", "replica"):
        head.tables.add(table=name, dim=1, count=len(keys))
    ones = np.ones((len(keys), 1), np.float32)
    stage_part(state, part_of(pack(head, keys, ones, keys, ones)))
    journal.behind = True
    number = durable.log.number
    asked = pb.CommitRequest(series="s", slots=1, scale=1, rate=1)
    assert commit_step(state, asked, None, asked.SerializeToString(), 1)
    assert durable.log.number == number + 1, "the log has taken the whole state meanwhile"
    live = state.tables["log"].native.pull(keys, True)
    assert len(np.unique(live)) == 1
    assert live[0, 0] != 0
    durable.close()
    ShardDirectory(again, tmp_path).close()
    np.testing.assert_array_equal(again.tables["log"].native.pull(keys, True), live)


def test_what_a_start_has_to_repeat_is_bounded_in_changes_too(tmp_path: Path) -> None:
    """Small ones take no room, and long to repeat; it counts them over restarts."""
    one = np.zeros(1, np.uint64)
    state = ShardState()
    durable = ShardDirectory(state, tmp_path)
    state.create(SPEC)
    pushed = 0
    while not durable.due():
        pushed += 1
        push(state, pushed, one)
        assert pushed < 17_000
        if pushed == 5000:
            durable.close()
            state = ShardState()
            durable = ShardDirectory(state, tmp_path)
    durable.fold()
    assert not durable.due()
    assert durable.log.records == 0
    durable.close()
    state = ShardState()
    durable = ShardDirectory(state, tmp_path)
    assert rows(state)[0] == pushed
    assert durable.log.records < 10
    durable.close()
