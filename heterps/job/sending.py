"""A job that brings its code: what is packed, and what its paths become on the nodes."""

import glob
import os
from pathlib import Path

from heterps.errors import CodeError
from heterps.job.packaging import Code
from heterps.job.packaging import pack as pack_folder
from heterps.job.prepare import data_path, is_url
from protos.job_pb2 import JobSpec


def root_of(job: JobSpec) -> Path:
    """The folder that is sent: the job file's own, or the one above it that `code` names.

    Raises:
        CodeError: it is neither.
    """
    root = Path(os.path.normpath(Path(job.directory, job.code or ".")))
    if not Path(job.directory).is_relative_to(root):
        raise CodeError(
            f"code: got {job.code!r}, expected the job file's folder or one above it, such as .."
        )
    return root


def pack(job: JobSpec, limit_bytes: int) -> Code:
    """Pack a job's code.

    Raises:
        CodeError: it is too large, or what the job names is not in it.
    """
    root = root_of(job)
    code = pack_folder(root, limit_bytes)
    entry = Path(job.model.entry.rpartition(":")[0])
    name = os.path.relpath(Path(job.directory, entry), root)
    if Path(name).as_posix() not in code.files:
        raise CodeError(
            f"model.entry: {entry} is not in the code that is sent, {root} without what its "
            ".heterpsignore leaves out. Name the folder that has both as `code` in the job file, "
            "or use a disk that all machines share with `heterps submit --no-code`"
        )
    return code


def settle(job: JobSpec, code: Code) -> None:
    """Write into a job what it means on a node.

    Data that travels with the code is named relative to the job's folder, other data by its
    absolute path, which is the same on a disk that all share.
    """
    job.code_digest = code.content.digest
    file, _, name = job.model.entry.rpartition(":")
    job.model.entry = f"{os.path.relpath(Path(job.directory, file), job.directory)}:{name}"
    if is_url(job.data.path):
        return
    root, folder = root_of(job), data_path(job)
    packed = set(code.files)
    names = [Path(os.path.relpath(path, root)).as_posix() for path in _data_files(job, root)]
    travels = bool(names) and all(name in packed for name in names)
    # A source that is given the job's own folder is given the copy of it.
    travels = travels or (bool(job.data.source) and folder == Path(job.directory))
    job.data.path = os.path.relpath(folder, job.directory) if travels else str(folder)


def _data_files(job: JobSpec, root: Path) -> list[str]:
    """The files that a job's data is in, folders among them as all that they hold.

    Of a source it is the folder that it is given.
    """
    folder, data = data_path(job), job.data
    patterns = [p for p in (data.train, data.valid, data.test) if p]
    if data.source:
        patterns = ["."] if folder.is_relative_to(root) else []
    patterns += [one.file for one in data.join.values()]
    found = [path for p in patterns for path in glob.glob(str(folder / p), recursive=True)]
    inside = [
        os.path.join(at, n) for path in found for at, _, names in os.walk(path) for n in names
    ]
    return [path for path in found if os.path.isfile(path)] + inside
