"""Where what a job left behind lands: a folder with its model, metrics.json and decision.json."""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from chassis import written
from chassis.files import replace_file
from heterps.client.records import Job, State
from heterps.errors import FetchError
from heterps.view.failure import DIVERGED, kept_model
from protos.artifacts_pb2 import Artifact
from protos.naming import KEPT

if TYPE_CHECKING:
    from scheduler import Decision

METRICS, DECISION, MODEL = "metrics.json", "decision.json", "model.json"
_CODE = "code.tar.gz"
_NOT_THE_MODEL = ("stage-", "cuts/", "from/")  # what a job goes on from, and what it began with
_ARCHIVE = ".code.tar.gz"  # while it is not unpacked yet


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What `get` brought.

    Attributes:
        job_id: of the job.
        folder: where it is; `heterps.load` opens it where there is a model.
        files: that are there, relative to the folder.
        model: whether a model is among them.
        note: why there is none, empty where there is.
    """

    job_id: str
    folder: str
    files: tuple[str, ...]
    model: bool
    note: str

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {**asdict(self), "files": list(self.files)}


class Download:
    """The folder being filled. What is there from an earlier time and unchanged stays."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        self._folder = folder.expanduser().absolute()
        self._note = ""
        self._code: Path | None = None

    def open(self) -> None:
        """Make the folder.

        Raises:
            FetchError: it holds something else.
        """
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            there = os.listdir(folder)
        except OSError as error:
            raise FetchError(f"{folder}: {error.strerror}; name another with --to DIR") from None
        if there and self._owner() != self._job.job_id:
            raise FetchError(
                f"{folder}: holds {sorted(there)[0]!r}; expected a new or empty folder, or one "
                f"that an earlier `heterps get {self._job.job_id}` made. Name another with --to DIR"
            )
        written.claim(folder)
        self._write(METRICS, self._job.to_json())  # first: it says whose folder this is

    def wanted(self, files: Sequence[Artifact]) -> list[Artifact]:
        """The files to fetch of those that the scheduler keeps."""
        names = {file.name for file in files}
        if MODEL not in names:
            self._note = self._why_none()
            return []
        return [file for file in files if not file.name.startswith(_NOT_THE_MODEL)]

    def place(self, file: Artifact) -> Path | None:
        """Where a file goes; None where it is already.

        Raises:
            FetchError: its name leads elsewhere.
        """
        name = PurePosixPath(file.name)
        if name.is_absolute() or ".." in name.parts or not name.parts:
            raise FetchError(f"job {self._job.job_id}: refuses a file named {file.name!r}")
        path = self._folder / (_ARCHIVE if file.name == _CODE else name)
        if file.name == _CODE:
            self._code = path
        if path.is_file() and path.stat().st_size == file.bytes and _digest(path) == file.digest:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def close(self, decision: "Decision | None", code_limit: int = 0) -> JobFiles:
        """Unpack the code, take a model that lies on a shared disk, write the decision."""
        if self._code is not None:
            self._unpack(self._code, code_limit)
        source = Path(self._job.output)
        if self._note and self._job.output and (source / MODEL).is_file():
            shutil.copytree(source, self._folder, dirs_exist_ok=True)
            self._note = ""
        if decision is not None:
            self._write(DECISION, decision.to_json())
        model = (self._folder / MODEL).is_file() and not self._note
        if model and self._job.end_reason == DIVERGED:
            self._note = f"it is the {kept_model(False, DIVERGED)}"
        elif self._job.state is not State.SUCCEEDED:
            self._note = f"the job {self._job.state}: it left no model"
        return JobFiles(self._job.job_id, str(self._folder), self._files(), model, self._note)

    def _unpack(self, archive: Path, limit: int) -> None:
        from workers.model.code.unpack import ArchiveError, Limits, unpack

        code = self._folder / "code"
        shutil.rmtree(code, ignore_errors=True)
        try:
            unpack(archive, code, Limits(most_bytes=limit))
        except ArchiveError as error:
            raise FetchError(f"job {self._job.job_id}: its code is refused: {error}") from None
        archive.unlink()

    def _why_none(self) -> str:
        output = self._job.output
        if output and not output.startswith(KEPT):
            return f"the model is in {output} on the nodes, which is not on this machine's disk"
        return "the scheduler keeps no model of it any more: room was needed for later jobs"

    def _owner(self) -> str:
        try:
            return str(json.loads((self._folder / METRICS).read_text())["job_id"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _write(self, name: str, value: Any) -> None:

        text = json.dumps(value, indent=2, allow_nan=False) + "\n"
        replace_file(self._folder / name, text)

    def _files(self) -> tuple[str, ...]:
        found = (path for path in self._folder.rglob("*") if path.is_file())
        return tuple(sorted(path.relative_to(self._folder).as_posix() for path in found))


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
