"""The code that a job brings along: fetched by its digest, unpacked for the job, run in there.

A job without such code finds it at its `directory`, on a disk that all share.
"""

import logging
import os
import posixpath
import shutil
import sys
import threading
from pathlib import Path

from chassis import rooms
from chassis.channels import RpcError, call, connect
from chassis.entries import imported
from chassis.files import lacks_room
from chassis.security import VARIABLES
from chassis.transfer import TransferError, fetch
from protos.artifacts_pb2 import GetArtifactRequest, HasRequest
from protos.artifacts_pb2_grpc import ArtifactsStub
from protos.job_pb2 import JobSpec
from workers.model.code.unpack import ArchiveError, Limits, unpack

_KEPT = 16  # archives; the one used longest ago goes first
_LOCKS = 16
_ASK_S = 10.0
_RETRY_S = 30.0
_log = logging.getLogger("heterps.code")


class CodeError(RuntimeError):
    """The job's code cannot be had; worded for its owner."""


def subfolder(job: JobSpec) -> str:
    """The job file's folder within what is sent, such as `.` or examples/flights.

    Raises:
        CodeError: it is not in there.
    """
    root = posixpath.normpath(posixpath.join(job.directory, job.code or "."))
    inside = posixpath.relpath(job.directory, root)
    if inside.startswith("..") or posixpath.isabs(inside):
        raise CodeError(
            f"code: got {job.code!r}, expected the job file's folder or one above it, such as .."
        )
    return inside


def located(job: JobSpec, root: Path) -> JobSpec:
    """The job as it is where its code was unpacked.

    Raises:
        CodeError: its folder is not in there.
    """
    inside = subfolder(job)
    folder = root if inside == "." else root / inside
    if not folder.is_dir():
        raise CodeError(f"job {job.name}: its code has no folder {inside}; submit it again")
    moved = JobSpec()
    moved.CopyFrom(job)
    moved.directory = str(folder)
    return moved


class CodeCache:
    """Archives of code on a node, and the copies that jobs run in.

    Args:
        directory: for the archives.
        scheduler: that has them.
    """

    def __init__(self, directory: Path, scheduler: str) -> None:
        self._directory = directory
        self._scheduler = scheduler
        # One thread does it, others wait: by folder, and by archive. A folder's is taken first.
        self._folders = [threading.Lock() for _ in range(_LOCKS)]
        self._archives = [threading.Lock() for _ in range(_LOCKS)]

    def follow(self, scheduler: str) -> None:
        """Ask another address from now on."""
        self._scheduler = scheduler

    def bring(self, job: JobSpec, folder: Path) -> JobSpec:
        """The job with its code in `folder`, unpacked there unless it was before.

        A job that brings no code is returned as it is.

        Raises:
            CodeError: it cannot be fetched, or is refused.
            OSError: there is no room for it.
        """
        if not job.code_digest:
            return job
        with self._folders[hash(folder) % _LOCKS]:
            if not folder.exists():
                try:
                    archive, limits = self._archive(job.code_digest)
                    unpack(archive, folder, limits)
                except ArchiveError as error:
                    raise CodeError(f"the job's code is refused: {error}") from None
                except OSError as error:
                    told = f"{error.strerror}: the job's code is to be brought there"
                    raise OSError(error.errno, told, str(folder)) from None
        return located(job, folder)

    def _archive(self, digest: str) -> tuple[Path, Limits]:
        """The archive on this node's disk, and what it may take."""
        if len(digest) != 64 or not all(c in "0123456789abcdef" for c in digest):
            raise CodeError(f"code_digest: {digest[:80]!r}: expected 64 hexadecimal digits")
        path = self._directory / digest
        what = f"scheduler {self._scheduler}: the job's code {digest[:12]}"
        channel = connect(self._scheduler)
        try:
            stub = ArtifactsStub(channel)
            limit = call(
                stub.Has, HasRequest(), what=what, timeout_s=_ASK_S, retry_s=_RETRY_S
            ).code_limit
            with self._archives[hash(path) % _LOCKS]:
                if path.exists():
                    os.utime(path)
                else:
                    self._directory.mkdir(parents=True, exist_ok=True)
                    request = GetArtifactRequest(digest=digest)
                    fetch(stub, request, path, what=what, most_bytes=limit, retry_s=_RETRY_S)
                    _log.info("fetched code %s, %d bytes", digest[:12], path.stat().st_size)
                    self._prune()
        except (RpcError, TransferError, OSError) as error:
            if isinstance(error, OSError) and lacks_room(error):
                raise
            raise CodeError(f"{error}; submit the job again to send its code again") from None
        finally:
            channel.close()
        return path, Limits(most_bytes=limit)

    def _prune(self) -> None:
        archives = [path for path in self._directory.iterdir() if not path.name.startswith(".")]
        archives.sort(key=lambda path: path.stat().st_mtime)
        for path in archives[:-_KEPT]:
            path.unlink(missing_ok=True)


def code_root(job: JobSpec) -> Path:
    """The folder that has all of the job's code."""
    return Path(posixpath.normpath(posixpath.join(job.directory, job.code or ".")))


def copy_code(job: JobSpec, folder: Path) -> None:
    """Copy a job's code to where its model is.

    Of a job that brought it that is all of it. Of one that was found where it is, these are the
    modules of its folder that this process has imported, and none where its entry is outside.
    """
    root = code_root(job)
    if job.code_digest:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root, folder, ignore=ignored, dirs_exist_ok=True)
        return
    for file in _imported(job):
        target = folder / file.relative_to(root.resolve())
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def settle(job: JobSpec, code: Path) -> None:
    """Have a saved model's job be where its code is.

    Where that was not sent, the job's own folder still counts while the modules in it are those
    that came along: they may read other files of it.
    """
    if not code.is_dir():
        return
    file, _, name = job.model.entry.rpartition(":")
    job.model.entry = f"{os.path.relpath(Path(job.directory, file), job.directory)}:{name}"
    if job.code_digest or not _is_still(code_root(job), code):
        job.directory = os.path.normpath(code / subfolder(job))


def _is_still(root: Path, code: Path) -> bool:
    """Whether all files of `code` are in `root`, too."""
    return all(
        (there := root / file.relative_to(code)).is_file()
        and there.read_bytes() == file.read_bytes()
        for file in code.rglob("*.py")
    )


def _imported(job: JobSpec) -> list[Path]:
    """The files of modules that were imported from a job's folder, installed ones left out."""
    root = code_root(job).resolve()
    entry = Path(job.directory, job.model.entry.rpartition(":")[0]).resolve()
    files = {getattr(module, "__file__", None) for module in imported()}
    # Modules that are no file, such as `torch.ops`, may have a name as theirs.
    paths = [Path(file) for file in files if file and file.endswith(".py")]
    found = {path.resolve() for path in paths if path.is_absolute() and path.is_file()}
    installed = [Path(one) for one in (sys.prefix, sys.base_prefix) if not root.is_relative_to(one)]
    own = {
        file
        for file in found
        if file.is_relative_to(root)
        and not rooms.in_ours(str(file))
        and not any(file.is_relative_to(one) for one in installed)
        and "site-packages" not in file.relative_to(root).parts
    }
    return sorted(own) if entry in own else []


def enter(job: JobSpec) -> None:
    """Make the job's folder this process's own, as if its code had been started there.

    Its modules can be imported at any time, and win wherever a worker needs none of ours. With code
    that was brought along the folder is also the working directory; processes that this one starts
    still find this project first.
    """
    root = str(code_root(job))
    for folder in dict.fromkeys((root, job.directory) if job.code_digest else (job.directory,)):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    rooms.give_way([Path(root), Path(job.directory)])
    if not job.code_digest:
        return
    for variable in VARIABLES:  # files that were named from where we were
        if os.environ.get(variable):
            os.environ[variable] = os.path.abspath(os.environ[variable])
    before = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(rooms.ROOT), *before]))
    os.environ["PYTHONSAFEPATH"] = "1"
    os.chdir(job.directory)
