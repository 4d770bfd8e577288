"""Files that appear whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from chassis.files import aside, open_regular, replace_file


def test_an_old_file_is_replaced_and_nothing_is_left_beside(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_file(path, "old")
    replace_file(path, b"new", durable=True)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_a_private_file_is_its_owners_alone_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("readable by all")
    path.chmod(0o644)
    replace_file(path, "secret", private=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failure_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def write_half() -> None:
        with aside(path) as unfinished:
            unfinished.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "none" / "a", "text")


def test_a_pipe_a_device_and_a_folder_are_no_files(tmp_path: Path) -> None:
    path, pipe = tmp_path / "a", tmp_path / "pipe"
    path.write_text("text")
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(pipe)  # nobody ever writes to it
    with open_regular(tmp_path / "link") as stream:
        assert stream.read() == b"text"
    for other in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=f"expected a regular file: '{other}'"):
            open_regular(other)
