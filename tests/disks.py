"""Small disks that are full when a test says so."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A file system in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def free(self) -> int:
        """Bytes that can still be written."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, left: int = 0) -> None:
        """Leave so many bytes free."""
        with (self.path / "ballast").open("ab") as stream:
            stream.write(bytes(max(0, self.free - left)))

    def relieve(self) -> None:
        """Undo `fill`."""
        (self.path / "ballast").unlink()


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[SmallDisk]:
    """A disk of `size` bytes at `path`; the test is skipped where nobody may mount one."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "heterps-test", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
