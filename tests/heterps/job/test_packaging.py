"""Packing code: the same bytes for the same files, and nothing that should stay."""

import os
import tarfile
from pathlib import Path

import pytest

from heterps.errors import CodeError
from heterps.job.packaging import IGNORE, Code, pack
from workers.model.unpack import Limits, unpack

LIMIT = 1 << 20


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")


def members(code: Code) -> list[tarfile.TarInfo]:
    code.content.stream.seek(0)
    with tarfile.open(fileobj=code.content.stream, mode="r:gz") as archive:
        return archive.getmembers()


def test_the_same_files_give_the_same_digest(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, "model.py", "a/b.py", "job.yaml")
    write(second, "job.yaml", "a/b.py", "model.py")
    os.utime(second / "model.py", (1, 1))
    (second / "a/b.py").chmod(0o600)
    one, other = pack(first, LIMIT), pack(second, LIMIT)
    assert one.content.digest == other.content.digest
    assert one.files == ("a/b.py", "job.yaml", "model.py")
    for entry in members(one):
        assert (entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, 0, "", "")
    (second / "a/b.py").write_text("# other\n")
    assert pack(second, LIMIT).content.digest != one.content.digest
    (first / "a/b.py").chmod(0o755)
    assert pack(first, LIMIT).content.digest != one.content.digest, "it may be run now"


def test_what_is_packed_unpacks(tmp_path):
    write(tmp_path / "in", "model.py", "deep/er/x.py", "ünïcödé.txt", "a" * 150 + ".py")
    code = pack(tmp_path / "in", LIMIT)
    archive = tmp_path / "code.tar.gz"
    code.content.stream.seek(0)
    archive.write_bytes(code.content.stream.read())
    unpack(archive, tmp_path / "out", Limits())
    for name in code.files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()


def test_some_things_always_stay(tmp_path):
    write(tmp_path, "model.py", ".git/config", "__pycache__/m.pyc", "pkg/__pycache__/x.pyc")
    write(tmp_path, ".venv/lib/x.py", ".env", "certs/server-key.pem", "pkg/in.py", ".ssh/id_rsa")
    assert pack(tmp_path, LIMIT).files == ("model.py", "pkg/in.py")


@pytest.mark.parametrize("name", [IGNORE, ".gitignore"])
def test_the_rules_are_those_of_git(tmp_path, name):
    write(tmp_path, "model.py", "data/a.csv", "data/keep.csv", "sub/data.csv", "runs/x/y", "a.log")
    (tmp_path / name).write_text("# what jobs do not need\n/data/*\n!keep.csv\nruns/\n*.log\n")
    found = [file for file in pack(tmp_path, LIMIT).files if not file.startswith(".")]
    assert found == ["data/keep.csv", "model.py", "sub/data.csv"]


def test_our_own_file_counts_before_that_of_git(tmp_path):
    write(tmp_path, "model.py", "data.csv")
    (tmp_path / ".gitignore").write_text("data.csv\n")
    (tmp_path / IGNORE).write_text(".*ignore\n")
    assert pack(tmp_path, LIMIT).files == ("data.csv", "model.py")


def test_links_that_lead_out_stay_and_are_named(tmp_path):
    write(tmp_path / "code", "model.py", "real.py")
    write(tmp_path, "secret.txt")
    (tmp_path / "code/same.py").symlink_to("real.py")
    (tmp_path / "code/out.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "code/round").symlink_to(tmp_path / "code")
    os.mkfifo(tmp_path / "code/pipe")
    code = pack(tmp_path / "code", LIMIT)
    assert code.files == ("model.py", "real.py", "same.py")
    assert all(entry.isreg() for entry in members(code)), "a link inside is a copy"
    assert len(code.left_out) == 3
    for said in ("out.txt: a link", "round: a link", "pipe: neither"):
        assert any(said in line for line in code.left_out)


def test_too_much_is_refused_with_the_biggest_first(tmp_path):
    write(tmp_path, "model.py")
    for name, size in (("small.bin", 300_000), ("large.bin", 700_000), ("mid.bin", 500_000)):
        (tmp_path / name).write_bytes(os.urandom(size))
    with pytest.raises(CodeError) as raised:
        pack(tmp_path, LIMIT)
    text = str(raised.value)
    assert text.index("large.bin") < text.index("mid.bin") < text.index("small.bin")
    assert IGNORE in text
    (tmp_path / IGNORE).write_text("*.bin\n")
    assert pack(tmp_path, LIMIT).files == (IGNORE, "model.py")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    if os.getuid() == 0:
        pytest.skip("root may read every file")
    write(tmp_path, "model.py", "closed.py")
    (tmp_path / "closed.py").chmod(0)
    with pytest.raises(CodeError, match=r"closed\.py"):
        pack(tmp_path, LIMIT)
