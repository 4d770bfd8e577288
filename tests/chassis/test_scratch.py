"""Folders that processes of a host share: made once, private, and gone when nobody uses them."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from chassis import scratch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an attempt, on a host of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = scratch.folder_of("job", 1)
    monkeypatch.setenv(scratch.VARIABLE, str(found))
    return found


def user(folder: Path, code: str) -> subprocess.Popen[str]:
    """A process that uses the folder, and has said something."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"from chassis import scratch\nfolder = scratch.own()\n{code}"],
        env=os.environ | {scratch.VARIABLE: str(folder), "TMPDIR": str(folder.parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_it_is_this_users_alone(folder: Path) -> None:
    assert scratch.own() == folder == scratch.own()
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_folder_that_others_can_guess_is_ours_alone_or_refused(tmp_path: Path) -> None:
    made = scratch.own_alone(tmp_path / "ours")
    assert made.stat().st_mode & 0o777 == 0o700
    assert scratch.own_alone(made) == made
    made.chmod(0o750)
    (tmp_path / "link").symlink_to(scratch.own_alone(tmp_path / "other"))
    (tmp_path / "file").touch(mode=0o600)
    for name in ("ours", "link"):
        with pytest.raises(PermissionError, match=f"{name}: expected a folder that is this user's"):
            scratch.own_alone(tmp_path / name)
    with pytest.raises(FileExistsError):
        scratch.own_alone(tmp_path / "file")
    if os.getuid() == 0:
        os.chown(tmp_path / "other", 12345, 12345)
        with pytest.raises(PermissionError):
            scratch.own_alone(tmp_path / "other")


def test_without_a_name_or_a_private_place_there_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.mkdir(parents=True)
    folder.parent.chmod(0o777)
    assert scratch.own() is None
    monkeypatch.delenv(scratch.VARIABLE)
    assert scratch.own() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_goes_when_its_last_user_has_gone(folder: Path, number: signal.Signals) -> None:
    users = [user(folder, "print('uses it', flush=True); input()") for _ in range(2)]
    (folder / "rows").write_text("much")
    for one in users:
        scratch.remove_unused(folder)
        scratch.sweep()
        assert (folder / "rows").exists()
        one.send_signal(number)
        one.communicate()
    scratch.sweep()
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_temporary_folder_outlives_nobody_but_its_owner(
    folder: Path, number: signal.Signals
) -> None:
    kept = scratch.temporary("cluster")
    owner = user(folder, "print(scratch.temporary('cluster'), flush=True); input()")
    (left,) = set(kept.parent.iterdir()) - {kept, folder}
    (left / "logs").write_text("much")
    scratch.sweep()
    assert left.exists()
    owner.send_signal(number)
    owner.communicate()
    scratch.sweep()
    assert not left.exists()
    assert kept.exists()
    scratch.discard(kept)
    assert not kept.exists()
    scratch.discard(kept)


def test_one_makes_a_file_and_another_takes_the_place_of_one_that_was_killed(folder: Path) -> None:
    code = """
def make(path):
    path.write_text("half")
    print("began", flush=True)
    input()
scratch.once(folder / "a" / "file", make)
"""
    began = user(folder, code)
    other = user(folder, f"print('there', flush=True)\n{code.replace('half', 'whole')}")
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.3)  # it waits for the first one
    began.kill()
    began.communicate()
    assert other.communicate("\n", timeout=20)[0] == "began\n"
    assert (folder / "a" / "file").read_text() == "whole"
    scratch.once(folder / "a" / "file", lambda path: pytest.fail("made again"))
    assert sorted(path.name for path in (folder / "a").iterdir()) == ["file", "file.lock"]


def test_what_fails_leaves_nothing_half_done(folder: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        scratch.once(folder / "file", fail)
    scratch.once(folder / "file", lambda path: path.write_text("whole") and None)
    assert (folder / "file").read_text() == "whole"
