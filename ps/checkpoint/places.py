"""The store that a path or URL names."""

from pathlib import Path

from protos.naming import KEPT
from ps.checkpoint.artifact_store import ArtifactStore
from ps.checkpoint.fsspec_store import RemoteStore
from ps.checkpoint.store import LocalStore, Store


def open_store(place: str | Path) -> Store:
    """The store at a path or URL; nothing is created yet."""
    text = str(place)
    if text.startswith(KEPT):
        return ArtifactStore(text)
    if "://" in text and not text.startswith("file://"):
        return RemoteStore(text)
    return LocalStore(Path(text.removeprefix("file://")))
