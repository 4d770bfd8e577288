"""Running a job's `data.prepare`, which makes its data files once.

It runs in a process of its own, so that what it imports, prints or breaks stays there.
"""

import glob
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from chassis import rooms
from chassis.process import describe_exit, lifeline, module_argv
from heterps.errors import PrepareError
from heterps.job import child
from protos.job_pb2 import JobSpec

IN_PREPARE = ("heterps", "chassis", "protos")  # what its process has of ours


def is_url(path: str) -> bool:
    """Whether a `data.path` is for fsspec, on the nodes alone; file:// is a folder."""
    return "://" in path and not path.startswith("file://")


def data_path(job: JobSpec) -> Path:
    """The absolute folder of the job's data."""
    return Path(os.path.abspath(Path(job.directory, job.data.path.removeprefix("file://"))))


def prepare(job: JobSpec, on_line: Callable[[str], None] = lambda line: None) -> float:
    """Make the job's data where it says how, and check that its files are there.

    Args:
        on_line: called with each line that it prints, from another thread.

    Returns:
        Seconds taken.

    Raises:
        PrepareError: it failed, quoting the end of its output; or a file is missing.
    """
    started = time.monotonic()
    if is_url(job.data.path):
        return 0.0  # nodes read it, with credentials that this machine may not have
    if job.data.prepare:
        _run(job, on_line)
    folder = data_path(job)
    splits = () if job.data.source else ("train", "valid", "test")
    patterns = {key: getattr(job.data, key) for key in splits}
    patterns |= {f"join.{name}.file": one.file for name, one in sorted(job.data.join.items())}
    for key, pattern in patterns.items():
        if pattern and not glob.glob(str(folder / pattern)):
            hint = "" if job.data.prepare else ", or data.prepare to make it"
            raise PrepareError(
                f"data.{key}: got {pattern!r}, expected a file or glob in {folder}{hint}; "
                "nothing there matches"
            )
    return time.monotonic() - started


def _run(job: JobSpec, on_line: Callable[[str], None]) -> None:
    file, _, name = job.data.prepare.rpartition(":")
    script, path = Path(job.directory, file), data_path(job)
    argv = module_argv("heterps.job.prepare", str(script), name, str(path))
    code, tail = child.follow("prepare", argv, on_line)
    if code != 0:
        quoted = "\n".join(f"  {line}" for line in tail)
        raise PrepareError(
            f"data.prepare: {job.data.prepare} ended {describe_exit(code)}, making {path}\n{quoted}"
        )


def _main(script: str, name: str, path: str) -> int:
    """In the process of its own: load the script and call it."""
    lifeline()
    sys.path.insert(0, str(Path(script).parent))
    rooms.give_way([Path(script).parent], IN_PREPARE)
    try:
        spec = importlib.util.spec_from_file_location(Path(script).stem, script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # so that its dataclasses and pickles find it
        spec.loader.exec_module(module)
        getattr(module, name)(path)
    except Exception as error:
        # From the user's own code on: the loading above it explains nothing.
        trace = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in trace if frame.filename == script]
        if own and not isinstance(error, ValueError | RuntimeError):
            print("".join(traceback.format_list(own)), end="")
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
