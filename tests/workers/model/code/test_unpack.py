"""Archives that somebody made by hand: each trick is refused, and nothing is left behind."""

import errno
import gzip
import io
import os
import resource
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.model.code.unpack import ArchiveError, Limits, unpack

LIMITS = Limits(most_bytes=1 << 20, files=50, path_bytes=100, depth=8)


def entry(name: str, data: bytes = b"x", **facts: object) -> tuple[tarfile.TarInfo, bytes]:
    """A member, with whatever a forger sets."""
    made = tarfile.TarInfo(name)
    made.size = len(data)
    for key, value in facts.items():
        setattr(made, key, value)
    return made, data


def link(name: str, target: str, kind: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, b"", type=kind, linkname=target)


def archive(folder: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    path = folder / "code.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        for info, data in entries:
            made.addfile(info, io.BytesIO(data))
    return path


def test_files_and_folders_arrive_as_ours(tmp_path):
    made = archive(
        tmp_path,
        entry("pack", b"", type=tarfile.DIRTYPE, mode=0o7777),
        entry("pack/model.py", b"print()\n", mode=0o6644, uid=0, gid=0),
        entry("deep/er/run.sh", b"#!/bin/sh\n", mode=0o4755),
    )
    unpack(made, tmp_path / "out", LIMITS)
    assert (tmp_path / "out/pack/model.py").read_bytes() == b"print()\n"
    for path in (tmp_path / "out").rglob("*"):
        status = path.stat()
        assert status.st_uid == os.getuid()
        assert not status.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | 0o022), path
    assert (tmp_path / "out/deep/er/run.sh").stat().st_mode & 0o100
    assert not (tmp_path / "out/pack/model.py").stat().st_mode & 0o111


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([entry("../evil.py")], "leads out"),
        ([entry("a/../../evil.py")], "leads out"),
        ([entry("/etc/evil.py")], "leads out"),
        ([entry("a\\..\\evil.py")], "leads out"),
        ([link("out", "/etc", tarfile.SYMTYPE), entry("out/evil.py")], "symbolic link to '/etc'"),
        ([link("up", "..", tarfile.SYMTYPE)], "symbolic link"),
        ([entry("a.py"), link("b.py", "a.py", tarfile.LNKTYPE)], "hard link"),
        ([link("passwd", "/etc/passwd", tarfile.LNKTYPE)], "hard link"),
        ([link("null", "", tarfile.CHRTYPE)], "device or pipe"),
        ([link("disk", "", tarfile.BLKTYPE)], "device or pipe"),
        ([link("pipe", "", tarfile.FIFOTYPE)], "device or pipe"),
        ([entry("a.py"), entry("a.py", b"other")], "comes twice"),
        ([entry("a", b"x"), entry("a/b.py")], "cannot be unpacked"),
        ([entry("n" * 101)], "101 bytes"),
        ([entry("/".join("abcdefghi"))], "9 parts"),
        ([entry(f"{n}.py") for n in range(51)], "over 50 files"),
        ([entry("a", bytes(600_000)), entry("b", bytes(600_000))], "over 1048576 bytes"),
        ([entry("strange", b"", type=b"Z")], "type b'Z'"),
    ],
)
def test_what_does_not_belong_is_refused(tmp_path, entries, said):
    made = archive(tmp_path, *entries)
    with pytest.raises(ArchiveError, match=said):
        unpack(made, tmp_path / "out" / "code", LIMITS)
    assert not any((tmp_path / "out").iterdir()), "nothing is left, not even hidden"
    assert sorted(os.listdir(tmp_path)) == ["code.tar.gz", "out"]


def bomb(path: Path, mebibytes: int, headers: Callable[[], bytes] = lambda: b"") -> Path:
    """A few kilobytes that unpack to mebibytes."""
    with gzip.open(path, "wb", 9) as stream:
        stream.write(headers())
        for _ in range(mebibytes):
            stream.write(bytes(1 << 20))
    return path


def claimed(size: int) -> bytes:
    """The header of a member that says it is so large."""
    made = tarfile.TarInfo("big.bin")
    made.size = size
    return made.tobuf(tarfile.GNU_FORMAT)


def extended(size: int) -> bytes:
    """A header whose extended attributes say they are so large: readers hold them in memory."""
    made = tarfile.TarInfo("pax")
    made.type, made.size = tarfile.XHDTYPE, size
    return made.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "headers",
    [lambda: claimed(20 << 20), lambda: claimed(1 << 40), lambda: extended(20 << 20)],
    ids=["as large as it says", "says a terabyte", "in its attributes"],
)
def test_a_bomb_is_refused_before_it_goes_off(tmp_path, headers):
    made = bomb(tmp_path / "bomb.tar.gz", 20, headers)
    assert made.stat().st_size < 1 << 15
    with pytest.raises(ArchiveError, match="over 1048576 bytes"):
        unpack(made, tmp_path / "out" / "code", LIMITS)
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("spoil", ["cut", "flipped", "text", "empty"])
def test_damage_is_named(tmp_path, spoil):
    made = archive(tmp_path, entry("a.py", os.urandom(5000)))
    data = made.read_bytes()
    made.write_bytes(
        {
            "cut": data[:2000],
            "flipped": data[:2500] + bytes(500) + data[3000:],
            "text": b"no archive at all",
            "empty": b"",
        }[spoil]
    )
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(made, tmp_path / "out" / "code", LIMITS)
    assert not any((tmp_path / "out").iterdir())


def test_no_room_for_it_says_nothing_against_it(tmp_path):
    made = archive(tmp_path, entry("a.py", b"x" * 5000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as raised:
            unpack(made, tmp_path / "out" / "code", LIMITS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert not any((tmp_path / "out").iterdir())


def test_a_folder_that_is_there_is_not_overwritten(tmp_path):
    made = archive(tmp_path, entry("a.py"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(ArchiveError, match="cannot be unpacked"):
        unpack(made, tmp_path / "out", LIMITS)
    assert os.listdir(tmp_path / "out") == ["mine"]
