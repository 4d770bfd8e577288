"""Data at URLs: from a real HTTP server, copied once for all workers of the machine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from protos.job_pb2 import DataSpec
from workers.data import Dataset
from workers.data.batches import in_order
from workers.data.errors import DataError
from workers.data.files import remote


class Handler(SimpleHTTPRequestHandler):
    served: list[str]

    def do_GET(self):
        self.server.served.append(self.path)  # type: ignore[attr-defined]
        super().do_GET()

    def log_message(self, *arguments):
        pass


class Site:
    """A folder, served."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        handler = partial(Handler, directory=str(folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.served = []  # type: ignore[attr-defined]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def fetched(self, name: str) -> int:
        return sum(path.endswith(name) for path in self.server.served)  # type: ignore[attr-defined]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("HETERPS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "site" / "rows"
    folder.mkdir(parents=True)
    for part in range(3):
        rows = [f"{part},{n},{n % 2}" for n in range(10)]
        (folder / f"part-{part}.csv").write_text("\n".join(["a,x,y", *rows]) + "\n")
    made = Site(tmp_path / "site")
    yield made
    made.server.shutdown()
    made.server.server_close()


def spec(path: str, train: str = "part-0.csv") -> DataSpec:
    return DataSpec(path=path, train=train, label="y", dense=["x"], sparse=["a"])


def values(data: DataSpec, directory: Path) -> list[float]:
    dataset = Dataset(data, "train", directory)
    return [float(x) for _, batch in in_order(dataset, 4, 0, 1) for x in batch["dense"][:, 0]]


def test_rows_are_the_same_from_anywhere(site, tmp_path):
    local = values(spec(str(site.folder / "rows")), tmp_path)
    assert local == list(range(10))
    assert values(spec(f"file://{site.folder}/rows"), tmp_path) == local
    assert values(spec(f"{site.url}/rows"), tmp_path) == local
    assert values(spec(f"{site.url}/rows", "part-*.csv"), tmp_path) == local * 3


def test_workers_of_a_machine_copy_a_file_once(site):
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(remote.copies, f"{site.url}/rows", "part-1.csv", "data.train")
            for _ in range(6)
        ]
        paths = {one.result()[0] for one in asked}
    assert len(paths) == 1
    assert site.fetched("part-1.csv") == 1


def test_a_file_that_changed_is_copied_again(site, tmp_path):
    data = spec(f"{site.url}/rows")
    assert values(data, tmp_path)[0] == 0
    path = site.folder / "rows" / "part-0.csv"
    path.write_text("a,x,y\n1,77,0\n")
    os.utime(path, (1, 1))
    assert values(data, tmp_path) == [77]


def test_copies_asked_for_long_ago_make_room(site, tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_CACHE_BYTES", "100")
    first = remote.copies(f"{site.url}/rows", "part-0.csv", "data.train")[0]
    second = remote.copies(f"{site.url}/rows", "part-1.csv", "data.train")[0]
    assert first.exists(), "it may be in use"
    for path in (first, second):
        os.utime(path.parent, (1, 1))
    remote.copies(f"{site.url}/rows", "part-2.csv", "data.train")
    assert not first.exists()
    assert not second.exists()


_KILLED = """
import os, signal, sys
from fsspec.implementations.local import LocalFileSystem
from workers.data.files import remote

def killed(self, source, target, **options):
    with open(target, "wb") as part:
        part.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

LocalFileSystem.get_file = killed
remote.copies(sys.argv[1], "part-0.csv", "data.train")
"""


def test_killed_workers_leave_no_more_than_one_part(site, tmp_path):
    url = f"file://{site.folder}/rows"
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", _KILLED, url], check=False)
        assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "cache").glob("*/*"))) == 2  # a lock, and what came
    (copy,) = remote.copies(url, "part-0.csv", "data.train")
    assert sorted(path.name for path in copy.parent.iterdir()) == [".lock", "part-0.csv"]


@pytest.mark.parametrize(
    ("path", "train", "said"),
    [
        ("{url}/rows", "absent.csv", "nothing there matches"),
        ("{url}/rows", "absent-*.csv", "nothing there matches"),
        ("nosuch://bucket/rows", "a.csv", "a URL that fsspec can read"),
        ("http://127.0.0.1:1/rows", "a.csv", "data.train"),
    ],
)
def test_what_cannot_be_read_is_named(site, tmp_path, path, train, said):
    with pytest.raises(DataError, match=said):
        Dataset(spec(path.format(url=site.url), train), "train", tmp_path)


def test_a_cache_that_another_user_could_have_made_is_refused(monkeypatch, tmp_path):
    closed = tmp_path / "file"
    closed.touch()
    monkeypatch.delenv("HETERPS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))  # no folder can be made in there
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = remote.cache_folder()
    assert found.parent == tmp_path
    assert found.stat().st_mode & 0o777 == 0o700
    found.chmod(0o777)
    with pytest.raises(PermissionError, match="name another as HETERPS_CACHE"):
        remote.cache_folder()
