"""The results of the scheduler's benchmark on disk, part by part, so that any can be repeated.

`Rows` go to the file as they come; a part that was interrupted goes on where it was, unless what
it depends on has changed.
"""

import datetime
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("numpy", "torch", "optuna", "scipy")
_SAVE_EVERY = 10  # rows

Row = dict[str, Any]


@dataclass(slots=True)
class Store:
    """One results file: `parts[name]` holds settings, rows and a summary."""

    path: Path
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Read what is there."""
        parts = json.loads(path.read_text())["parts"] if path.is_file() else {}
        return cls(path, parts)

    def begin(self, part: str, settings: Mapping[str, Any], resume: bool) -> list[Row]:
        """Start a part, or go on with one of the same settings; the rows that are there."""
        wanted = {**settings, "policy": policy_hash()}
        before = self.parts.get(part)
        if resume and before is not None and before["settings"] == wanted:
            return list(before["rows"])
        self.parts[part] = {
            "date": datetime.date.today().isoformat(),
            "settings": wanted,
            "rows": [],
            "summary": {},
        }
        return []

    def add(self, part: str, row: Row) -> None:
        """Keep a row."""
        rows = self.parts[part]["rows"]
        rows.append(row)
        if len(rows) % _SAVE_EVERY == 0:
            self.save()

    def finish(self, part: str, summary: Mapping[str, Any]) -> None:
        """Keep what the rows come to."""
        self.parts[part]["summary"] = dict(summary)
        self.save()

    def rows(self, part: str) -> list[Row]:
        return list(self.parts.get(part, {}).get("rows", ()))

    def save(self) -> None:
        """Write the file whole, one line for each row."""
        whole = {"benchmark": "scheduler", "machine": machine(), "versions": versions()}
        text = json.dumps(whole, indent=1)[:-2] + ',\n "parts": {\n'
        text += ",\n".join(_part_text(name, self.parts[name]) for name in sorted(self.parts))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text + "\n }\n}\n")
        temporary.replace(self.path)


def _part_text(name: str, part: Mapping[str, Any]) -> str:
    rows = ",\n".join(f"    {json.dumps(row)}" for row in part["rows"])
    head = {key: value for key, value in part.items() if key != "rows"}
    body = ",\n".join(f"   {json.dumps(key)}: {json.dumps(head[key])}" for key in head)
    return f'  {json.dumps(name)}: {{\n{body},\n   "rows": [\n{rows}\n   ]\n  }}'


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.is_file():
        names = [x for x in described.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {"processor": model, "architecture": platform.machine(), "cores": os.cpu_count()}


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found


def policy_hash() -> str:
    """Hash of the policies in the package, so that figures of an older one are not mixed in."""
    digest = sha256()
    for path in sorted((ROOT / "scheduler").rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def pending(todo: Iterator[Any], done: set[Any]) -> Iterator[Any]:
    """Those of `todo` whose first item is not among `done`."""
    return (item for item in todo if item[0] not in done)
