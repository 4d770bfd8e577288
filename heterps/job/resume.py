"""Going on where a `heterps train` was killed: its checkpoints are found in the output folder."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from heterps.errors import HeterpsError
from heterps.job.checkpoints import CUT, MODEL
from protos.job_pb2 import JobSpec, Origin

_FORMAT = "heterps-cut-"
_MOST_BYTES = 64 << 20
_ENDING = ".cuts"


class ResumeError(HeterpsError):
    """There is nothing to go on from, or somebody else is at it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in the output folder, with what was submitted."""

    origin: Origin
    job: JobSpec
    taken_at: float


def newest(job: JobSpec) -> Found:
    """The newest checkpoint that a job of this name has left in its output folder.

    Raises:
        ResumeError: there is none, that job's model is there, or it still runs.
    """
    output = Path(job.directory, job.output)
    cuts = (_read(path) for path in output.glob(f"*{_ENDING}/*/{CUT}"))
    found = [cut for cut in cuts if cut is not None and cut.job.name == job.name]
    if not found:
        raise ResumeError(
            f"{output}: no checkpoint of {job.name} is there; expected one of a run with "
            "train.checkpoint.every. Begin at the first step without --resume"
        )
    latest = max(found, key=lambda cut: (cut.taken_at, cut.origin.step))
    before = latest.origin.job_id
    if (output / before / MODEL).is_file():
        raise ResumeError(
            f"{output / before}: {before} has ended, and its model is there: nothing is left to go "
            f"on with. To train it further use --from {before}"
        )
    with running(output, before):
        return latest


@contextmanager
def running(output: Path, job_id: str) -> Iterator[None]:
    """Mark a job as running for as long as this process lives; the kernel takes the mark away.

    Raises:
        ResumeError: it runs already.
    """
    path = output / f".{job_id}.running"
    output.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResumeError(
                f"{output}: {job_id} still runs; expected one that has ended"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
        with suppress(OSError):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _read(path: Path) -> Found | None:
    """A checkpoint by its manifest; None for one that cannot be read: workers would not either."""
    try:
        with path.open("rb") as stream:
            facts: dict[str, Any] = json.loads(stream.read(_MOST_BYTES))
        if not str(facts["format"]).startswith(_FORMAT):
            return None
        origin = Origin(
            job_id=facts["job_id"],
            step=facts["step"],
            place=str(path.parent.absolute()),
            samples=facts["samples"],
        )
        job = ParseDict(facts["job"], JobSpec(), ignore_unknown_fields=True)
        return Found(origin, job, float(facts["taken_at"]))
    except (OSError, ValueError, KeyError, TypeError, ParseError, AttributeError):
        return None
