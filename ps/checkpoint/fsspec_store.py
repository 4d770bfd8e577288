"""Checkpoints at any place that fsspec can reach (s3://, gs://, ...)."""

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO, cast

from ps.checkpoint.store import Written
from ps.errors import CheckpointError


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

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> Written:
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

    def replace(self, name: str, data: bytes | memoryview) -> None:
        """See Store."""
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(self._path(name), bytes(data))

    def open(self, name: str) -> BinaryIO:
        """See Store."""
        self._files.invalidate_cache()  # others write here too: no size of before
        return cast("BinaryIO", self._files.open(self._path(name), "rb"))

    def size(self, name: str) -> int:
        """See Store."""
        self._files.invalidate_cache()
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

    def alone(self) -> AbstractContextManager[bool]:
        """See Store. fsspec has no conditional put that all its stores would keep."""
        return nullcontext(False)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"
