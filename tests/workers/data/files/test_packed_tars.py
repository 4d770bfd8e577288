"""Compressed tars are read as plain ones, whole, or there is an error that names the place."""

import bz2
import gzip
import io
import os
import tarfile
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from protos.job_pb2 import JobSpec
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.check import check
from workers.data.files import tar as tar_files
from workers.data.files import unpacked
from workers.data.files.remote import cache_folder
from workers.model.saved.predict import rows as predicted

ROWS = 300
PACK = {
    "gz": lambda content: gzip.compress(content, 1),
    "two.gz": lambda content: gzip.compress(content[:5000]) + gzip.compress(content[5000:]),
    "tgz": lambda content: gzip.compress(content, 1),
    "zst": lambda content: pa.compress(content, "zstd", asbytes=True),
    "bz2": bz2.compress,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_CACHE", str(tmp_path / "cache"))
    tar_files._index.cache_clear()


def tar(rows):
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for row in rows:
            random = np.random.default_rng(row).bytes(700).hex().encode()
            for name, content in ((f"{row:04}.id", b"%d" % row), (f"{row:04}.txt", random)):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return written.getvalue()


def name_of(kind):
    return "a.tgz" if kind == "tgz" else f"a.tar.{kind.removeprefix('two.')}"


def job_of(folder, train):
    job = JobSpec(directory=str(folder))
    job.data.path, job.data.train, job.data.label = ".", train, "id"
    job.data.sparse.append("txt")
    job.train.loss = "mse"
    return job


def rows_of(job):
    batches = GlobalBatches(Dataset.of(job, "train"), 64, seed=3)
    found = [batches.read(step)["label.label"] for step in range(batches.steps)]
    return np.concatenate(found).astype(int).tolist()


@pytest.mark.parametrize("kind", PACK)
def test_rows_are_those_of_the_plain_tar(tmp_path, kind):
    content = tar(range(ROWS))
    (tmp_path / "a.tar").write_bytes(content)
    (tmp_path / name_of(kind)).write_bytes(PACK[kind](content))
    plain = rows_of(job_of(tmp_path, "a.tar"))
    assert sorted(plain) == list(range(ROWS))
    job = job_of(tmp_path, name_of(kind))
    check(job)
    assert rows_of(job) == plain
    paths = predicted.find(str(tmp_path / name_of(kind)))
    assert predicted.known_rows(paths) == ROWS


@pytest.mark.parametrize("kind", PACK)
def test_one_that_is_cut_short_is_refused_wherever_it_is(tmp_path, kind):
    path, packed = tmp_path / name_of(kind), PACK[kind](tar(range(40)))
    cuts = [0, 1, 9, 200, len(packed) // 2, len(packed) - 9, len(packed) - 1]
    cuts += [len(gzip.compress(tar(range(40))[:5000]))] * (kind == "two.gz")
    for cut in cuts:
        path.write_bytes(packed[:cut])
        with pytest.raises(DataError, match=rf"{path.name}: contents: got .*expected") as caught:
            check(job_of(tmp_path, path.name))
        if cut == len(packed) // 2 and "gz" in kind:  # others come in large blocks
            assert "in or behind 00" in str(caught.value)
    assert not list(cache_folder().rglob("*.partial"))
    path.write_bytes(packed)
    assert sorted(rows_of(job_of(tmp_path, path.name))) == list(range(40))


@pytest.mark.parametrize("kind", ["gz", "bz2"])
def test_a_wrong_byte_is_found_by_the_checksum(tmp_path, kind):
    packed = bytearray(PACK[kind](tar(range(40))))
    packed[len(packed) // 2] ^= 1
    (tmp_path / name_of(kind)).write_bytes(packed)
    with pytest.raises(DataError, match=r"in or behind .*', expected a whole a.tar"):
        check(job_of(tmp_path, name_of(kind)))


def test_what_is_behind_is_never_left_unread(tmp_path):
    both = tar(range(5)) + tar(range(5, 9))
    (tmp_path / "a.tar").write_bytes(both)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(both))
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(tar(range(5))) + b"behind it")
    for name in ("a.tar", "a.tar.gz"):
        with pytest.raises(DataError, match="more behind the end of the tar"):
            check(job_of(tmp_path, name))
    with pytest.raises(DataError, match=r"b\.tar\.gz"):
        check(job_of(tmp_path, "b.tar.gz"))


def test_a_limit_and_a_full_disk_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(10 << 20)))
    monkeypatch.setenv("HETERPS_CACHE_BYTES", str(3 << 20))
    with pytest.raises(DataError, match=r"at most 3145728 bytes .* larger HETERPS_CACHE_BYTES"):
        check(job_of(tmp_path, "a.tar.gz"))
    monkeypatch.delenv("HETERPS_CACHE_BYTES")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"No space left.*expected room for it unpacked in"):
        check(job_of(tmp_path, "a.tar.gz"))
    assert not list(cache_folder().rglob("*.partial"))


def test_a_copy_that_is_gone_is_made_again_and_one_of_another_file_is_not_used(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tar(range(40))))
    dataset = Dataset.of(job_of(tmp_path, path.name), "train")
    assert dataset.rows == 40
    copy = unpacked.plain(path)
    copy.unlink()
    assert [len(batch) for batch in dataset.read(0)] == [40]
    path.write_bytes(gzip.compress(tar(range(7))))
    assert Dataset.of(job_of(tmp_path, path.name), "train").rows == 7


def test_it_is_unpacked_once_for_all(tmp_path, monkeypatch):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar(range(40))))
    made, unpack = [], unpacked._unpack

    def counted(path: Path, compression: str, target: Path) -> None:
        made.append(path)
        unpack(path, compression, target)

    monkeypatch.setattr(unpacked, "_unpack", counted)
    threads = [
        threading.Thread(target=unpacked.plain, args=(tmp_path / "a.tar.gz",)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
