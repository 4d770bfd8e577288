"""The results of the scheduler's benchmark on disk, part by part, so that any can be repeated.

`Rows` go to the file as they come; a part that was interrupted goes on where it was, unless what
it depends on has changed.
"""

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from bench.pages import ROOT, machine, versions, write
from bench.scheduler.statistics import Row

_SAVE_EVERY = 10  # rows


def _versions() -> dict[str, str]:
    return versions("numpy", "torch", "optuna", "scipy")


@dataclass(slots=True)
class Store:
    """One results file: `parts[name]` holds settings, rows and a summary.

    `machine` and `versions` are those of the newest rows.
    """

    path: Path
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=_versions)

    @classmethod
    def open(cls, path: Path) -> "Store":
        """Read what is there."""
        if not path.is_file():
            return cls(path)
        whole = json.loads(path.read_text())
        return cls(path, whole["parts"], whole["machine"], whole["versions"])

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
        self.machine, self.versions = machine(), _versions()
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
        whole = {"benchmark": "scheduler", "machine": self.machine, "versions": self.versions}
        text = json.dumps(whole, indent=1)[:-2] + ',\n "parts": {\n'
        text += ",\n".join(_part_text(name, self.parts[name]) for name in sorted(self.parts))
        write(self.path, text + "\n }\n}\n")


def _part_text(name: str, part: Mapping[str, Any]) -> str:
    rows = ",\n".join(f"    {json.dumps(row)}" for row in part["rows"])
    head = {key: value for key, value in part.items() if key != "rows"}
    body = ",\n".join(f"   {json.dumps(key)}: {json.dumps(head[key])}" for key in head)
    return f'  {json.dumps(name)}: {{\n{body},\n   "rows": [\n{rows}\n   ]\n  }}'


def policy_hash() -> str:
    """Hash of the policies in the package, so that figures of an older one are not mixed in."""
    digest = sha256()
    for path in sorted((ROOT / "scheduler").rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
