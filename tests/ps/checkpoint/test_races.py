"""Savers, loaders and publishers at one place, any of them stopped or killed at any point.

In a save numbered k every row has the value k, so that rows of two saves show.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chassis.channels import connect
from protos import parameter_server_pb2 as pb
from protos.parameter_server_pb2_grpc import ParameterServerStub
from ps import CheckpointError, Follower, LocalShards, LocalTable, ParameterClient, ShardError
from ps.checkpoint.store import LocalStore
from ps.checkpoint.tables import chain, save_of
from ps.table.spec import make_spec
from tests.pids import stop
from tests.ps.checkpoint.manifests import rewrite
from tests.waiting import wait_until

KEYS = np.arange(4000)
DIM = 4

_CHILD = """
import sys, time
import numpy as np
from ps import ParameterClient, Publisher
from ps.client import hold
addresses, place = sys.argv[1].split(","), sys.argv[2]
"""
_SAVE = _CHILD + "ParameterClient(addresses).save(place)\n"
_PUBLISH = (
    _CHILD
    + """
with ParameterClient(addresses) as client:
    Publisher(client, place).publish()
"""
)
_HOLDS = (
    _CHILD
    + """
def stay(*args):
    print("held", flush=True)
    time.sleep(600)

hold._unfinished = stay  # called when pushes are held back
"""
)


def _make(client: ParameterClient) -> None:
    client.create_table("t", DIM, optimizer="sgd", learning_rate=1.0, initializer="zeros")


def _write(client: ParameterClient, value: float, keys: np.ndarray = KEYS) -> None:
    client.assign("t", keys, np.full((len(keys), DIM), value, np.float32))


def _value(rows: np.ndarray) -> int:
    """The number of the save that all rows are of."""
    values = np.unique(rows)
    assert len(values) == 1, f"rows of several saves: {values}"
    return int(values[0])


def _loaded(place: Path) -> int:
    return _value(LocalTable.load_checkpoint(place)["t"].pull(KEYS))


@contextmanager
def _process(script: str, shards: LocalShards, place: Path) -> "Iterator[subprocess.Popen[str]]":
    argv = [sys.executable, "-c", script, ",".join(shards.addresses), str(place)]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


class Saver(threading.Thread):
    """Saves to one place, again and again, a number one higher each time; pauses between."""

    def __init__(self, shards: LocalShards, place: Path, pause_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.client = ParameterClient(shards.addresses)
        self.place = place
        self.pause_s = pause_s
        self.ended = threading.Event()
        self.error: BaseException | None = None
        _make(self.client)
        self.number = 1
        self._save()

    def run(self) -> None:
        try:
            while not self.ended.wait(self.pause_s):
                self.number += 1
                self._save()
        except BaseException as error:
            self.error = error

    def _save(self) -> None:
        _write(self.client, self.number)
        self.client.save(self.place)

    def __enter__(self) -> "Saver":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.join(60)
        self.client.close()
        assert self.error is None, self.error


@pytest.fixture(scope="module")
def saving() -> Iterator[LocalShards]:
    with LocalShards(2) as running:
        yield running


@pytest.fixture(scope="module")
def loading() -> Iterator[LocalShards]:
    with LocalShards(3) as running:
        yield running


@pytest.mark.parametrize(
    "rounds", [12, pytest.param(300, marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
def test_a_load_is_of_one_save(
    saving: LocalShards, loading: LocalShards, tmp_path: Path, rounds: int
) -> None:
    seen = set()
    with (
        Saver(saving, tmp_path / "ck"),
        ParameterClient(loading.addresses) as client,
    ):
        for _ in range(rounds):
            assert client.load(tmp_path / "ck") == len(KEYS)
            seen.add(_value(client.pull("t", KEYS)))
            seen.add(_loaded(tmp_path / "ck"))
    assert len(seen) > 1, "saves were made between the loads"


def test_a_shard_loads_the_save_that_was_named_and_no_other(
    saving: LocalShards, tmp_path: Path
) -> None:
    place = tmp_path / "ck"
    with ParameterClient(saving.addresses) as client:
        _make(client)
        _write(client, 1)
        client.save(place)
        first = save_of(chain(LocalStore(place)))
        _write(client, 2)
        client.save(place)
        with connect(saving.addresses[0]) as channel:
            stub = ParameterServerStub(channel)
            request = pb.LoadRequest(directory=str(place), shards=2, save=first)
            with pytest.raises(Exception, match="another save has taken the place"):
                list(stub.Load(iter([request, pb.LoadRequest()]), timeout=20))
        assert _value(client.pull("t", KEYS)) == 2
    argv = [sys.executable, "-m", "ps.server", "--restore", str(place), "--save", first]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "another save has taken the place" in done.stderr


@pytest.mark.exhaustive
def test_shards_that_begin_with_a_save_begin_with_one(saving: LocalShards, tmp_path: Path) -> None:
    with Saver(saving, tmp_path / "ck", pause_s=2.0):  # three processes start in one
        for _ in range(6):
            with (
                LocalShards(3, directory=tmp_path / "ck") as begun,
                ParameterClient(begun.addresses) as client,
            ):
                _value(client.pull("t", KEYS))


def test_what_one_shard_refuses_no_shard_loads(saving: LocalShards, tmp_path: Path) -> None:
    place = tmp_path / "ck"
    with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
        _make(client)
        _write(client, 1)
        client.save(place)
        _write(client, 2)
        with connect(shards.addresses[1]) as channel:  # which alone has it otherwise
            stub = ParameterServerStub(channel)
            stub.DropTables(pb.DropTablesRequest(prefix="t"), timeout=20)
            other = make_spec("t", DIM, optimizer="adam")
            stub.CreateTable(pb.CreateTableRequest(table=other), timeout=20)
        with pytest.raises(ShardError, match=r"shard 1 .*'t' differs from the one in use"):
            client.load(place)
        with connect(shards.addresses[0]) as channel:
            stats = ParameterServerStub(channel).Stats(pb.StatsRequest(), timeout=20)
        own = client.keys("t", 10_000)
        rows = client.pull("t", own)
        assert len(own) == stats.tables[0].rows > 1000
        assert set(np.unique(rows)) <= {2.0}, "the first shard has what it had"
        client.create_table("u", 1)
        client.push("u", KEYS, np.ones((len(KEYS), 1), np.float32))  # nothing is held back


def test_what_a_shard_has_lost_is_not_saved_over(saving: LocalShards, tmp_path: Path) -> None:
    place = tmp_path / "ck"
    with ParameterClient(saving.addresses) as client:
        client.drop_tables("t")
        _make(client)
        _write(client, 1)
        client.save(place)
        with connect(saving.addresses[1]) as channel:  # as if it had been started again
            request = pb.DropTablesRequest(prefix="t")
            ParameterServerStub(channel).DropTables(request, timeout=20)
        with pytest.raises(CheckpointError, match=r"'t' is not on shards \[1\]"):
            client.save(place)
        client.drop_tables("t")
        with pytest.raises(CheckpointError, match=r"has 1 tables, and the shards have none"):
            client.save(place, prefix="t")
        assert _loaded(place) == 1
        assert len(list(place.glob("save-*"))) == 1
    rewrite(place, lambda tree: tree["files"].remove(_file_of(tree, "t", 1)))
    with pytest.raises(CheckpointError, match=r"names no file of table 't' for shards \[1\]"):
        _loaded(place)


def _file_of(tree: dict[str, Any], table: str, shard: int) -> dict[str, Any]:
    return next(f for f in tree["files"] if (f["table"], f["shard"]) == (table, shard))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("what", ["save", "load"])
def test_pushes_go_on_when_whoever_holds_them_back_does_not(
    tmp_path: Path, how: signal.Signals, what: str
) -> None:
    """A loader that dies once every shard has read its rows leaves all as it was."""
    place = tmp_path / "ck"
    with (
        LocalShards(2) as shards,
        ParameterClient(shards.addresses, timeout_s=14, shared_memory=False) as client,
    ):
        _make(client)
        _write(client, 1)
        client.save(place)
        _write(client, 2)
        script = f"{_HOLDS}ParameterClient(addresses).{what}(place)\n"
        with _process(script, shards, place) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            os.kill(holder.pid, how)
            assert _value(client.pull("t", KEYS)) == 2
            _write(client, 3)
            client.save(tmp_path / "other")
            assert _loaded(tmp_path / "other") == 3
            assert _value(client.pull("t", KEYS)) == 3
        assert _loaded(place) == 1


def _stopped_as_it_writes(writer: "subprocess.Popen[str]", place: Path, folders: str) -> Path:
    """Stop a process once its shards write into a new folder, which they go on to fill."""
    before = set(place.glob(folders))

    def begun() -> list[Path]:
        new = set(place.glob(folders)) - before
        return [folder for folder in new if len(list(folder.rglob("*.t.rows"))) == 2]

    (folder,) = wait_until(begun, "both shards write", pause_s=0.0005)
    stop(writer.pid)
    return folder


def _are_written(folder: Path, files: str) -> bool:
    """Whether both shards had been asked for their parts, and have written them."""
    with suppress(AssertionError):
        wait_until(lambda: len(list(folder.glob(files))) == 2, timeout_s=5.0)
        return True
    return False


def test_of_two_savers_at_a_place_one_is_stopped(saving: LocalShards, tmp_path: Path) -> None:
    """It is stopped when its shards write, and so goes on when another save has been made."""
    place = tmp_path / "ck"
    many = np.arange(300_000)
    with ParameterClient(saving.addresses) as client:
        _make(client)
        _write(client, 1, many)
        client.save(place)
        for number in range(2, 10):
            with _process(_SAVE, saving, place) as stopped:
                folder = _stopped_as_it_writes(stopped, place, "save-*")
                if not _are_written(folder, "*.window.json"):
                    continue
                was_late = folder.name not in (place / "manifest.json").read_text()
                _write(client, number, many)
                client.save(place)
                assert _loaded(place) == number
                os.kill(stopped.pid, signal.SIGCONT)
                _, errors = stopped.communicate(timeout=60)
            assert _loaded(place) == number
            if was_late:
                assert "another one has been written since this one was begun" in errors
                assert stopped.returncode == 1
                break
        else:
            pytest.fail("it was never stopped before its end")
        assert len(list(place.glob("save-*"))) == 1, "what nobody names has gone"


def test_a_writer_that_is_stopped_as_it_replaces_keeps_nothing_but_the_lock(
    saving: LocalShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "ck"
    monkeypatch.setattr("ps.checkpoint.store._LOCK_S", 0.2)
    with ParameterClient(saving.addresses) as client:
        _make(client)
        _write(client, 1)
        client.save(place)
        _write(client, 2)
        locked = (
            f"import fcntl\nlock = open({str(place / '.lock')!r}, 'ab')\n"
            "fcntl.flock(lock, fcntl.LOCK_EX)\nprint('locked', flush=True)\ntime.sleep(600)\n"
        )
        with _process(_CHILD + locked, saving, place) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            stop(holder.pid)
            with pytest.raises(CheckpointError, match="another process has kept it locked"):
                client.save(place)
            assert _loaded(place) == 1
            holder.kill()
            holder.wait()
            client.save(place)
        assert _loaded(place) == 2


def test_of_two_publishers_at_a_place_one_is_stopped(saving: LocalShards, tmp_path: Path) -> None:
    place = tmp_path / "feed"
    many = np.arange(300_000)

    with ParameterClient(saving.addresses) as client:
        client.drop_tables("t")
        _make(client)
        _write(client, 1, many)
        from ps import Publisher

        publisher = Publisher(client, place)
        publisher.publish()
        follower = Follower(place)
        for number in range(2, 10):
            _write(client, number, many)
            with _process(_PUBLISH, saving, place) as stopped:
                folder = _stopped_as_it_writes(stopped, place, "delta-*")
                if not _are_written(folder, "*/*.rows"):
                    continue
                was_late = folder.name not in (place / "latest.json").read_text()
                publisher.publish()
                os.kill(stopped.pid, signal.SIGCONT)
                _, errors = stopped.communicate(timeout=60)
            follower.poll()
            assert _value(follower.lookup("t", many)) == number
            assert _value(Follower(place).lookup("t", many)) == number
            if was_late:
                assert "another" in errors
                assert stopped.returncode == 1
                break
        else:
            pytest.fail("it was never stopped before its end")


def test_a_delta_whose_parent_goes_meanwhile_is_refused(
    saving: LocalShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ps.client import save as saves

    with ParameterClient(saving.addresses) as client:
        client.drop_tables("t")
        _make(client)
        _write(client, 1)
        client.save(tmp_path / "base")
        real = saves._write_parts

        def overtaken(*given, **named):  # type: ignore[no-untyped-def]
            done = real(*given, **named)
            monkeypatch.setattr(saves, "_write_parts", real)
            client.save(tmp_path / "base")
            return done

        monkeypatch.setattr(saves, "_write_parts", overtaken)
        with pytest.raises(CheckpointError, match="another save has been made there meanwhile"):
            client.save(tmp_path / "delta", mode="delta", since=tmp_path / "base")
        assert not list((tmp_path / "delta").glob("save-*"))


_COUNT = """
import sys
from pathlib import Path
from ps.checkpoint.store import LocalStore

store, count = LocalStore(Path(sys.argv[1])), Path(sys.argv[1]) / "count"
for _ in range(int(sys.argv[2])):
    with store.alone() as alone:
        assert alone
        count.write_text(str(int(count.read_text()) + 1))
"""


def test_only_one_is_alone_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "count").write_text("0")
    argv = [sys.executable, "-c", _COUNT, str(tmp_path), "60"]
    processes = [subprocess.Popen(argv) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "180"
    assert os.listdir(tmp_path) == ["count"]
