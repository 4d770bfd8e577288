"""Profiles that this machine has measured, kept while all that they follow from is the same.

That is the job's code and settings, its data's files, the types asked for, this machine, what is
installed, the modules that were imported, and how fast a core does some small work now: a virtual
machine may be half as fast in another hour. What is not known to be the same is measured anew: a
profile that no longer describes what runs would make plans that are wrong. Jobs judge it, too: each
says at its end what it measured of what was promised.
"""

import glob
import hashlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from chassis.files import replace_file
from chassis.scratch import own_alone
from protos.decision_pb2 import Workload
from protos.job_pb2 import JobSpec
from protos.node_pb2 import ProfileReply, ProfileRequest
from workers.device.units import compute_environment

FOLDER = "HETERPS_PROFILES"  # where they lie; `off`: none are kept
DRIFT = 1.3  # times as fast or slow: of small work, and of promises kept
_PATIENCE_S, _PAUSE_S = 2.5, 0.1  # with a machine that is slow just now: a profile takes longer
POOR = 2.0  # times what was promised, or a part of it: such a profile was none
_OLD_S = 30 * 86400.0
_COARSE_S = 1.0  # by which the times of files may be behind
_KEPT = 64
_FILES = 5000  # of a job's folder, and of its data: with more of them nothing is kept
_CODE_BYTES = 64 << 20  # of a folder that is read whole: with more nothing is kept
_MODULES = 20_000  # that a profile may name
_JOBS = 1024  # of which it is known what they were planned by
_SKIPPED = {".git", "__pycache__", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
_NOT_MEASURED: Final = ("name", "output", "priority", "retries", "deadline_hours", "schedule")
_SPEAKING = ("OMP_", "MKL_", "KMP_", "DNNL_", "ONEDNN_", "OPENBLAS_", "ATEN_", "TORCH", "CUDA_")
_OURS = "HETERPS_"
_OURS_ELSEWHERE = ("TLS_", "TOKEN", "HOME", "PROFILES")
_ROOMS = ("workers", "ps", "chassis", "protos")
_log = logging.getLogger("heterps.node")


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is known of a kept profile beside its figures.

    Attributes:
        at: when it was measured, seconds since 1970.
        work_s: what `small_work` took then.
        digest: of its bytes.
        loaded: the files of all modules that were imported for it, but for the job's own.
        as_loaded: a digest of what they were.
        kept: of the throughput that was promised by it, as the first job came to; 0: none has.
    """

    at: float
    work_s: list[float]
    digest: str
    loaded: list[str]
    as_loaded: str
    kept: float = 0.0


class KeptProfiles:
    """Those of a node.

    Args:
        kind: its resource type.
        device: its hardware, for people.
        units: how many there are.
        folder: where they lie; None: nothing is kept.
    """

    def __init__(self, kind: str, device: str, units: int, folder: Path | None) -> None:
        self._here = [kind, device, units]
        self._folder = folder
        self._begun = time.time() - _COARSE_S
        self._lock = threading.Lock()
        self._of_jobs: dict[str, str] = {}  # keys

    def key(self, request: ProfileRequest) -> str:
        """Differs where another profile may come of a request; empty: it is not to be kept."""
        if self._folder is None:
            return ""
        job = JobSpec()
        job.CopyFrom(request.job)
        for name in _NOT_MEASURED:
            job.ClearField(name)
        try:
            data = _data_of(job)
            code = job.code_digest or _tree_of(Path(job.directory, job.code or "."))
            named = _named_in(job)
        except (OSError, ValueError):
            return ""
        if data is None or named is None or not code:
            return ""
        if job.code_digest:
            job.ClearField("directory")
        parts = [
            job.SerializeToString(deterministic=True).hex(),
            request.resources.SerializeToString(deterministic=True).hex(),
            *(code, data, named, self._here, _machine(), _installed(), _settings(os.environ)),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def find(self, key: str, job_id: str) -> ProfileReply | None:
        """What was kept, with the time when it was measured, for a job that will be planned by it.

        None where a module that it was measured with has changed, or the machine is not as fast as
        it was.
        """
        if not key or self._folder is None:
            return None
        try:
            entry, body = self._read(key)
            found = Workload.FromString(body)
        except (OSError, ValueError, TypeError, KeyError, DecodeError):
            return None
        if not 0 <= time.time() - entry.at < _OLD_S:
            return None
        if entry.as_loaded != _state_of(entry.loaded):
            _log.info("a kept profile is of other modules than are there now: not used")
            return None
        if not _as_fast_as(entry.work_s):
            _log.info("a kept profile is of a machine that was faster or slower: not used")
            return None
        with suppress(OSError):
            os.utime(self._place(key))
        self._remember(key, job_id)
        return ProfileReply(workload=found, kept_at=entry.at)

    def keep(self, key: str, job_id: str, workload: Workload, loaded: Sequence[str]) -> None:
        """Keep what was measured now; not where a module was written since this node began.

        Args:
            loaded: the files of all modules that were imported for it, but for the job's own.
        """
        if not key or self._folder is None:
            return
        body = workload.SerializeToString()
        as_loaded = _state_of(loaded, self._begun)  # a process to fork from may have the one before
        if not as_loaded:
            return
        entry = _Entry(
            time.time(), small_work(), hashlib.sha256(body).hexdigest(), [*loaded], as_loaded
        )
        try:
            self._write(key, entry, body)
            self._prune()
        except OSError as error:
            _log.info("a profile is not kept: %s", error)
            return
        self._remember(key, job_id)

    def judge(self, job_id: str, came_to: float) -> None:
        """Drop the profile of a job that came to another part of what was promised than before.

        Args:
            came_to: measured over predicted throughput.
        """
        with self._lock:
            key = self._of_jobs.pop(job_id, "")
        if not key or not came_to > 0:
            return
        try:
            entry, body = self._read(key)
            drift = came_to / entry.kept if entry.kept else 1.0
            if 1 / POOR <= came_to <= POOR and 1 / DRIFT <= drift <= DRIFT:
                if not entry.kept:
                    self._write(key, replace(entry, kept=came_to), body)
                return
            self._place(key).unlink(missing_ok=True)
            _log.info("a kept profile promised what was not so, %.2f of it: dropped", came_to)
        except (OSError, ValueError, TypeError, KeyError):
            return

    def _remember(self, key: str, job_id: str) -> None:
        with self._lock:
            self._of_jobs.pop(job_id, None)
            self._of_jobs[job_id] = key
            while len(self._of_jobs) > _JOBS:
                del self._of_jobs[next(iter(self._of_jobs))]

    def _place(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{key}.profile"

    def _read(self, key: str) -> tuple[_Entry, bytes]:
        head, _, body = self._place(key).read_bytes().partition(b"\n")
        entry = _Entry(**json.loads(head))
        if hashlib.sha256(body).hexdigest() != entry.digest:
            raise ValueError("it is damaged")
        return entry, body

    def _write(self, key: str, entry: _Entry, body: bytes) -> None:
        own_alone(self._place(key).parent)
        replace_file(self._place(key), json.dumps(asdict(entry)).encode() + b"\n" + body)

    def _prune(self) -> None:
        assert self._folder is not None
        found = sorted(self._folder.glob("*.profile"), key=lambda path: path.stat().st_mtime)
        for path in found[:-_KEPT]:
            path.unlink(missing_ok=True)


def folder_of(environment: Mapping[str, str]) -> Path | None:
    """Where a node keeps profiles; None: nowhere."""
    named = environment.get(FOLDER, "")
    if named == "off":
        return None
    if named:
        return Path(named).absolute()
    home = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "heterps" / "profiles"


def small_work() -> list[float]:
    """Seconds of this thread for some work of each kind: arithmetic, memory, the interpreter."""
    block, large = bytes(1 << 18), bytearray(1 << 23)
    works: tuple[Callable[[], object], ...] = (
        lambda: hashlib.sha256(block).digest(),
        lambda: large.count(1),
        lambda: sum(range(20_000)),
    )
    return [min(_seconds(work) for _ in range(8)) for work in works]


def _as_fast_as(then: list[float]) -> bool:
    """Whether small work takes what it took; where it takes longer, it may be so only now.

    Beside a job that starts, so does much else.
    """
    now, until = small_work(), time.monotonic() + _PATIENCE_S
    while not _alike(now, then) and time.monotonic() < until:
        if any(one * DRIFT < before for one, before in zip(now, then, strict=True)):
            return False  # faster than it was
        time.sleep(_PAUSE_S)
        now = [min(both) for both in zip(now, small_work(), strict=True)]
    return _alike(now, then)


def _seconds(work: Callable[[], object]) -> float:
    begin = time.thread_time()
    work()
    return time.thread_time() - begin


def _alike(now: list[float], then: list[float]) -> bool:
    pairs = zip(now, then, strict=True)
    return all(before > 0 and 1 / DRIFT <= one / before <= DRIFT for one, before in pairs)


def _data_of(job: JobSpec) -> list[object] | None:
    """Names, sizes and times of the files that a job reads; None: they are not known.

    Files that come with the code are known by its digest.
    """
    data = job.data
    plain = data.path.removeprefix("file://")
    if "://" in plain or data.source:
        return None
    if job.code_digest and not Path(plain).is_absolute():
        return []
    folder = Path(job.directory) / plain
    found: list[Path] = []
    for pattern in (data.train, data.valid, data.test, *(one.file for one in data.join.values())):
        if not pattern:
            continue
        exact = folder / pattern
        named = [exact] if exact.exists() else glob.glob(str(exact), recursive=True)
        for path in map(Path, named):
            found += [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        if len(found) > _FILES:
            return None
    return _identity(sorted(found)) if found else None


def _named_in(job: JobSpec) -> list[object] | None:
    """What lies where an argument of the model names a path; None: too much."""
    found: list[object] = []
    for text in _strings(json_format.MessageToDict(job.model.args)):
        path = Path(text)
        if not text or "\0" in text or (job.code_digest and not path.is_absolute()):
            continue
        path = Path(job.directory, path)
        if path.is_dir():
            tree = _tree_of(path)
            if not tree:
                return None
            found.append(tree)
        elif path.is_file():
            found += _identity([path])
    return found


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _tree_of(root: Path) -> str:
    """Of all files of a folder what is in them; empty: there are too many, or none."""
    digest, count, left = hashlib.sha256(), 0, _CODE_BYTES
    for at, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for path in (Path(at, name) for name in sorted(names)):
            if not path.is_file():  # no pipe is read
                continue
            count += 1
            left -= path.stat().st_size
            if count > _FILES or left < 0:
                return ""
            digest.update(json.dumps([str(path.relative_to(root)), path.stat().st_mode]).encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest() if count else ""


def _identity(paths: Iterable[Path]) -> list[object]:
    """Names, sizes and times of files, also when each was touched at all, which nobody can set."""
    found = ((path, path.stat()) for path in paths)
    return [(str(p.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns) for p, s in found]


def _state_of(loaded: Sequence[str], begun: float = math.inf) -> str:
    """A digest of these files; empty: one has gone, or was written after `begun`."""
    if len(loaded) > _MODULES:
        return ""
    try:
        found = [Path(path).stat() for path in loaded]
    except (OSError, ValueError, TypeError):
        return ""
    if any(one.st_ctime > begun for one in found):
        return ""
    told = [(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for s in found]
    return hashlib.sha256(json.dumps([[*loaded], told]).encode()).hexdigest()


def _machine() -> list[object]:
    """What computes here; its name, too, since it was this machine that was measured."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    said = [_text(path) for path in ("/sys/fs/cgroup/cpu.max", "/proc/driver/nvidia/version")]
    flags = next((x for x in _text("/proc/cpuinfo").splitlines() if x.startswith("flags")), "")
    memory = _text("/proc/meminfo").partition("\n")[0]
    return [*os.uname(), cores, memory, flags, *said]


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text()
    return ""


def _settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that may change how fast it computes."""
    return sorted(
        (name, value)
        for name, value in {**environment, **compute_environment()}.items()
        if name.startswith(_SPEAKING)
        or name == "GLIBC_TUNABLES"
        or (name.startswith(_OURS) and not name.removeprefix(_OURS).startswith(_OURS_ELSEWHERE))
    )


def _installed() -> list[object]:
    """The packages that can be imported, with their versions, and our own files."""
    root = Path(__file__).resolve().parents[2]
    ours = (path for room in _ROOMS for path in (root / room).rglob("*") if _is_code(path))
    return [sys.version, sorted(_packages(sys.path)), _identity(sorted(ours))]


def _is_code(path: Path) -> bool:
    return path.suffix in (".py", ".so", ".yaml") and path.is_file()


def _packages(folders: Iterable[str]) -> Iterable[str]:
    for folder in folders:
        with suppress(OSError):
            yield from (n for n in os.listdir(folder or ".") if n.endswith((".dist-info", ".pth")))
