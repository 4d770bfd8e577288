"""What travels with jobs, on the scheduler's disk: content by its digest, and names for it by job.

DIRECTORY/content/DIGEST holds bytes, DIRECTORY/jobs/JOB_ID.json the digest and size of each of a
job's files. Content that no job names goes after a while, and when room is needed the files of
the job that ended first: `output` in the job file names a place for models that must stay.
"""

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from chassis import written
from chassis.files import replace_file

LIMIT_BYTES = 20 << 30
CODE_LIMIT_BYTES = 64 << 20
CODE_NAME = "code.tar.gz"  # what a job's code is called among its files
_AWAITED_S = 3600.0  # code may come this long before its job
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_LONGEST_NAME = 512
_log = logging.getLogger("heterps.artifacts")


class ArtifactError(ValueError):
    """Content or a name that is not taken."""


class MissingError(ArtifactError):
    """Content that is not here."""


class FullError(ArtifactError):
    """There is no room, and nothing that may go."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A file of a job."""

    digest: str
    bytes: int


class Artifacts:
    """Content by digest; safe to use from many threads.

    Args:
        directory: for it alone, made if need be and readable by this user alone.
        is_over: whether a job has ended or is unknown: its files may go when room is needed.
        limit_bytes: of all content.
        code_limit_bytes: of the code of one job, packed and unpacked.
    """

    def __init__(
        self,
        directory: Path,
        is_over: Callable[[str], bool],
        limit_bytes: int = LIMIT_BYTES,
        code_limit_bytes: int = CODE_LIMIT_BYTES,
    ) -> None:
        self.code_limit_bytes = code_limit_bytes
        self._limit = limit_bytes
        self._is_over = is_over
        self._content, self._names = directory / "content", directory / "jobs"
        self._incoming = directory / "incoming"
        self._lock = threading.RLock()
        self._reserved = 0  # bytes of what is being received
        for folder in (directory, self._content, self._names, self._incoming):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        written.claim(directory)
        for left_over in self._incoming.iterdir():
            left_over.unlink(missing_ok=True)
        self._sizes = {p.name: p.stat().st_size for p in self._content.iterdir()}
        self._total = sum(self._sizes.values())
        # Since when content waits for a job to name it.
        self._awaited = {p.name: p.stat().st_mtime for p in self._content.iterdir()}
        self._jobs = self._read_jobs()
        for files in self._jobs.values():
            for kept in files.values():
                self._awaited.pop(kept.digest, None)

    @property
    def total_bytes(self) -> int:
        """Of all content that is here."""
        return self._total

    def has(self, digest: str) -> bool:
        """Whether content is here; it then stays long enough for a job to name it."""
        with self._lock:
            here = digest in self._sizes
            if here:
                self._awaited[digest] = time.time()
            return here

    def require_room(self, size: int) -> None:
        """See that so many bytes are taken, before they are there.

        Raises:
            FullError: there is no room for them.
        """
        if size:
            with self._lock:
                self._make_room(size)

    def receive(self, digest: str, size: int, chunks: Iterator[bytes]) -> bool:
        """Keep content under its digest; False when it was here already.

        Raises:
            ArtifactError: its size or digest is not what was said; nothing was kept.
            FullError: there is no room for it.
        """
        if not _DIGEST.fullmatch(digest):
            raise ArtifactError(f"digest: {digest[:80]!r}: expected 64 hexadecimal digits")
        if self.has(digest):
            return False
        with self._room_for(size):
            path = self._incoming / token_hex(8)
            try:
                self._write(path, digest, size, chunks)
                with self._lock:
                    os.replace(path, self._content / digest)
                    self._total += size - self._sizes.get(digest, 0)
                    self._sizes[digest] = size
                    self._awaited[digest] = time.time()
            finally:
                path.unlink(missing_ok=True)
        return True

    def name(self, job_id: str, name: str, digest: str) -> None:
        """Make content a job's file; of the same name the later one counts.

        Raises:
            MissingError: the content is not here.
            ArtifactError: a name that cannot be one.
        """
        check_name(name)
        with self._lock:
            if digest not in self._sizes:
                raise MissingError(f"content {digest[:80]!r}: not here; send it first")
            files = self._jobs.get(job_id, {})
            before = files.get(name)
            self._keep(job_id, files | {name: Kept(digest, self._sizes[digest])})
            self._awaited.pop(digest, None)
            if before is not None:
                self._forget([before.digest])

    def lend(self, source: str, job_id: str, names: Mapping[str, str]) -> None:
        """Make files of one job those of another one as well, under other names.

        Args:
            names: by the name that each has with `source`.

        Raises:
            MissingError: one is not here; nothing has changed.
        """
        with self._lock:
            files = self._jobs.get(source, {})
            for name in names:
                if name not in files:
                    raise MissingError(f"job {source}: no file {name!r} is kept of it")
            lent = {new: files[name] for name, new in names.items()}
            self._keep(job_id, self._jobs.get(job_id, {}) | lent)

    def begin(self, job_id: str) -> None:
        """Forget the files of an earlier job of that id: the next one may be another user's."""
        with self._lock:
            before = self._jobs.pop(job_id, None)
            if before is not None:
                (self._names / f"{job_id}.json").unlink(missing_ok=True)
                self._forget([kept.digest for kept in before.values()])

    def files(self, job_id: str) -> dict[str, Kept]:
        """A job's files by name."""
        with self._lock:
            return dict(sorted(self._jobs.get(job_id, {}).items()))

    def jobs_of(self, digest: str) -> list[str]:
        """The jobs that have content among their files."""
        with self._lock:
            return [
                job_id
                for job_id, files in self._jobs.items()
                if any(kept.digest == digest for kept in files.values())
            ]

    def open(self, digest: str = "", job_id: str = "", name: str = "") -> tuple[BinaryIO, Kept]:
        """Content for reading: by its digest, or a job's file.

        Raises:
            MissingError: it is not here.
        """
        with self._lock:
            if not digest:
                kept = self._jobs.get(job_id, {}).get(name)
                if kept is None:
                    raise MissingError(f"job {job_id}: no file {name!r} is kept of it")
                digest = kept.digest
            if digest not in self._sizes:
                raise MissingError(f"content {digest[:80]!r}: not here")
            # Open, it can be read to its end even when it is removed meanwhile.
            return (self._content / digest).open("rb"), Kept(digest, self._sizes[digest])

    def remove(self, job_id: str, name: str) -> int:
        """Remove a job's file, or its files in a folder of that name; how many."""
        check_name(name)
        with self._lock:
            files = self._jobs.get(job_id, {})
            gone = [one for one in files if one == name or one.startswith(f"{name}/")]
            digests = [files.pop(one).digest for one in gone]
            if gone:
                self._forget(digests)  # on a full disk this makes the room for what follows
                self._keep(job_id, files)
            return len(gone)

    def sweep(self) -> int:
        """Remove what no job names and none is about to; bytes freed."""
        with self._lock:
            before = self.total_bytes
            self._forget(list(self._sizes))
            return before - self.total_bytes

    @contextmanager
    def _room_for(self, size: int) -> Iterator[None]:
        with self._lock:
            self._make_room(size)
            self._reserved += size
        try:
            yield
        finally:
            with self._lock:
                self._reserved -= size

    def _make_room(self, size: int) -> None:
        """Let go of what nobody names, then of the files of jobs that ended, the oldest first.

        Raises:
            FullError: that is not enough, for the limit or for the disk.
        """
        if size > self._limit:
            raise FullError(
                f"{size} bytes: the scheduler keeps at most {self._limit} in all "
                "(--artifacts-limit); name a folder or URL as `output` in the job file"
            )
        self.sweep()
        if not self._lacks(size):
            return
        ended = [one for one in sorted(self._jobs, key=self._written_at) if self._is_over(one)]
        staying = self._digests({*self._jobs} - {*ended})
        spare = sum(self._sizes.get(one, 0) for one in self._digests(ended) - staying)
        if lacking := self._lacks(size, spare):  # what would not do need not go
            raise FullError(f"{size} bytes: no room, {lacking}")
        for job_id in ended:
            if not self._lacks(size):
                return
            _log.warning("the files of job %s go: room is needed for others", job_id)
            digests = [kept.digest for kept in self._jobs.pop(job_id).values()]
            (self._names / f"{job_id}.json").unlink(missing_ok=True)
            self._forget(digests)

    def _lacks(self, size: int, spare: int = 0) -> str:
        """What so many bytes more would exceed, in words; empty: nothing.

        Args:
            spare: bytes that may go before.
        """
        taken = self.total_bytes + self._reserved - spare
        if taken + size > self._limit:
            return (
                f"{taken} of {self._limit} are taken by jobs that have not ended "
                "(--artifacts-limit)"
            )
        disk = os.statvfs(self._content)
        free = disk.f_bavail * disk.f_frsize + spare
        if disk.f_blocks and free < size:
            return f"the scheduler's disk has {free}; name a place as `output` in the job file"
        return ""

    def _digests(self, jobs: Iterable[str]) -> set[str]:
        return {kept.digest for job_id in jobs for kept in self._jobs[job_id].values()}

    def _forget(self, digests: list[str]) -> None:
        """Remove those that no job names, unless a job that names one may be on its way."""
        named = {kept.digest for files in self._jobs.values() for kept in files.values()}
        until = time.time() - _AWAITED_S
        for digest in digests:
            awaited = self._awaited.get(digest, 0.0) > until
            if digest in self._sizes and digest not in named and not awaited:
                (self._content / digest).unlink(missing_ok=True)
                self._total -= self._sizes.pop(digest)
                self._awaited.pop(digest, None)

    def _write(self, path: Path, digest: str, size: int, chunks: Iterator[bytes]) -> None:
        found, count = hashlib.sha256(), 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            for chunk in chunks:
                count += len(chunk)
                if count > size:
                    raise ArtifactError(f"content {digest}: over the {size} bytes it was to have")
                found.update(chunk)
                stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        if count != size:
            raise ArtifactError(f"content {digest}: {count} bytes; {size} were to come")
        if found.hexdigest() != digest:
            raise ArtifactError(
                f"content {digest}: what came has the digest {found.hexdigest()}: it was changed "
                "on its way, or the digest is of something else"
            )

    def _keep(self, job_id: str, files: dict[str, Kept]) -> None:
        told = {name: asdict(kept) for name, kept in files.items()}
        replace_file(self._names / f"{job_id}.json", json.dumps(told, indent=1) + "\n")
        self._jobs[job_id] = files  # only what is on the disk

    def _written_at(self, job_id: str) -> float:
        with suppress(OSError):
            return (self._names / f"{job_id}.json").stat().st_mtime
        return 0.0

    def _read_jobs(self) -> dict[str, dict[str, Kept]]:
        jobs: dict[str, dict[str, Kept]] = {}
        for path in self._names.glob("*.json"):
            try:
                files = json.loads(path.read_text())
                kept = {name: Kept(**facts) for name, facts in files.items()}
            except (OSError, ValueError, TypeError, AttributeError) as error:
                _log.warning("%s: %s; its job's files are forgotten", path, error)
                continue
            jobs[path.stem] = {n: k for n, k in kept.items() if k.digest in self._sizes}
        return jobs


def check_name(name: str) -> None:
    """Refuse a name that is not a relative path of plain parts.

    Raises:
        ArtifactError
    """
    plain = all(_PART.fullmatch(part) for part in name.split("/"))
    if not plain or len(name) > _LONGEST_NAME:
        raise ArtifactError(
            f"name: {name[:80]!r}: expected letters, digits and _ . - in parts that do not begin "
            "with a dot, separated by /"
        )
