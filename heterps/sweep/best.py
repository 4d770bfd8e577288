"""The model of the best trial, kept in a folder while a sweep goes on."""

import json
import os
import shutil
from pathlib import Path

from chassis import written
from heterps.client.client import Client
from heterps.client.download import METRICS
from heterps.sweep.errors import SweepError
from heterps.sweep.study import Trial


class BestModel:
    """A folder with the best model so far; the one before stays until the next is complete.

    Args:
        folder: new, empty, or of an earlier sweep.

    Raises:
        SweepError: it holds something else.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()
        self._next = self.folder.with_name(f"{self.folder.name}.next")
        for path in (self.folder, self._next):
            if path.exists() and not self._is_own(path):
                raise SweepError(
                    f"{path}: expected a new or empty folder, or one of an earlier sweep; "
                    "name another with --output"
                )

    def fetch(self, client: Client, job_id: str) -> None:
        """Bring the model of a trial that is to be the best."""
        shutil.rmtree(self._next, ignore_errors=True)
        self._next.parent.mkdir(parents=True, exist_ok=True)
        client.get(job_id, self._next)

    def settle(self, best: Trial | None) -> None:
        """Have the folder be that of the best trial, where its model was brought."""
        if best is None or _job_of(self._next) != best.job_id:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        os.rename(self._next, self.folder)

    def holds(self, best: Trial) -> bool:
        """Whether the model in the folder is that of the best trial."""
        return _job_of(self.folder) == best.job_id and (self.folder / "model.json").is_file()

    def close(self) -> None:
        """Remove what was brought and is not the best."""
        if self._next.exists():
            shutil.rmtree(self._next, ignore_errors=True)

    @staticmethod
    def _is_own(path: Path) -> bool:
        if not path.is_dir():
            return False
        return not any(path.iterdir()) or (written.is_marked(path) and bool(_job_of(path)))


def _job_of(folder: Path) -> str:
    """Whose files are in a folder that `heterps get` made; "" for no such."""
    try:
        return str(json.loads((folder / METRICS).read_text())["job_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
