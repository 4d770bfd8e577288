"""Manifests that say something else than what was saved, with a true checksum all the same."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def sealed(tree: dict[str, Any]) -> bytes:
    """A manifest of these fields, as it is written: its last field is the SHA-256 of the rest."""
    text = json.dumps({k: v for k, v in tree.items() if k != "sha256"}, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return (text.removesuffix("\n}") + f',\n "sha256": "{digest}"\n}}').encode()


def rewrite(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the fields of the manifest at a place."""
    path = place / "manifest.json"
    tree = json.loads(path.read_text())
    assert path.read_bytes() == sealed(tree), "the format of which the tests know"
    change(tree)
    path.write_bytes(sealed(tree))


def as_version_2(place: Path) -> None:
    """Make it one of those that have no checksum."""
    path = place / "manifest.json"
    tree = json.loads(path.read_text())
    del tree["sha256"]
    path.write_text(json.dumps(tree | {"version": 2}, indent=1))
