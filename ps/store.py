"""Where checkpoints lie: a directory, or any place that fsspec can reach (s3://, gs://, ...).

A save writes files under names that nobody uses yet and replaces one small file, the manifest,
last and in one step. That needs no renaming of directories, which object stores lack.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, Protocol, cast

from protos.naming import KEPT
from ps.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Written:
    """What was written."""

    bytes: int
    sha256: str


class Store(Protocol):
    """A folder of files. Names may contain one slash."""

    @property
    def url(self) -> str:
        """The place, as `open_store` takes it."""
        ...

    def write(self, name: str, chunks: Iterable[bytes]) -> Written:
        """Write a new file and wait until it is safe."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Put a small file in the place of an old one, in one step."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open for reading.

        Raises:
            OSError: it is not there, or cannot be read.
        """
        ...

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            OSError: it is not there.
        """
        ...

    def entries(self) -> list[str]:
        """Names of files and folders in it; none when it does not exist."""
        ...

    def remove(self, folder: str) -> None:
        """Remove a folder and what is in it; safe to repeat."""
        ...


def open_store(place: str | Path) -> Store:
    """The store at a path or URL; nothing is created yet."""
    text = str(place)
    if text.startswith(KEPT):
        from ps.artifacts import ArtifactStore

        return ArtifactStore(text)
    if "://" in text and not text.startswith("file://"):
        return RemoteStore(text)
    return LocalStore(Path(text.removeprefix("file://")))


class LocalStore:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def url(self) -> str:
        """Its absolute path."""
        return str(self._root)

    def write(self, name: str, chunks: Iterable[bytes]) -> Written:
        """See Store."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, size = hashlib.sha256(), 0
        with path.open("wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_directory(path.parent)
        _sync_directory(self._root)
        return Written(size, digest.hexdigest())

    def replace(self, name: str, data: bytes) -> None:
        """See Store."""
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._root / name
        new = path.with_name(f".{name}.{token_hex(4)}")
        with new.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, path)
        _sync_directory(self._root)

    def open(self, name: str) -> BinaryIO:
        """See Store."""
        return (self._root / name).open("rb")

    def size(self, name: str) -> int:
        """See Store."""
        return (self._root / name).stat().st_size

    def entries(self) -> list[str]:
        """See Store."""
        return sorted(os.listdir(self._root)) if self._root.is_dir() else []

    def remove(self, folder: str) -> None:
        """See Store."""
        path = self._root / folder
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


class RemoteStore:
    """A prefix of an object store, through fsspec. Objects appear whole or not at all."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise CheckpointError(
                f"{url}: fsspec is not installed; expected `pip install fsspec` and the package "
                f"for {url.partition('://')[0]}://"
            ) from None
        try:
            self._files, self._root = cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{url}: {error}") from None
        self._url = url.rstrip("/")
        self._root = self._root.rstrip("/")

    @property
    def url(self) -> str:
        """The URL given."""
        return self._url

    def write(self, name: str, chunks: Iterable[bytes]) -> Written:
        """See Store."""
        digest, size = hashlib.sha256(), 0
        path = self._path(name)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._files.open(path, "wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        return Written(size, digest.hexdigest())

    def replace(self, name: str, data: bytes) -> None:
        """See Store."""
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(self._path(name), data)

    def open(self, name: str) -> BinaryIO:
        """See Store."""
        return cast("BinaryIO", self._files.open(self._path(name), "rb"))

    def size(self, name: str) -> int:
        """See Store."""
        return int(self._files.size(self._path(name)))

    def entries(self) -> list[str]:
        """See Store."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, folder: str) -> None:
        """See Store."""
        path = self._path(folder)
        if self._files.exists(path):
            self._files.rm(path, recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
