"""The processes of jobs on one node: started once, watched, stopped, their logs readable."""

import logging
import os
import shutil
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from protos.node_pb2 import SHARD, STAGE, LaunchReply, LaunchRequest, ReadLogReply
from protos.process import Child, ChildError, last_lines, module_argv, spawn, stop_all
from protos.scheduler_pb2 import ProcessStatus

_WATCH_S = 0.1
_KEPT_JOBS = 100  # ended jobs whose logs stay readable
_READ_LIMIT = 1 << 20
_ROLES = {SHARD: "shard", STAGE: "stage"}
_log = logging.getLogger("heterps.node")


class LaunchError(RuntimeError):
    """A process that did not start, worded for the job's owner."""


@dataclass(slots=True)
class _Entry:
    """One process, from the request on."""

    request: LaunchRequest
    label: str
    ready: threading.Event = field(default_factory=threading.Event)  # or failed
    child: Child | None = None
    reply: LaunchReply | None = None
    error: str = ""
    ended: int | None = None


@dataclass(slots=True)
class _Job:
    directory: Path
    entries: dict[str, _Entry] = field(default_factory=dict)
    stopped: bool = False


class Processes:
    """Every process of every job on this node.

    Args:
        directory: logs and launch files go to DIRECTORY/JOB_ID.
        host: where the processes listen.
        ready_timeout_s: how long a process may take to listen.
        changed: called when a process has ended.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        ready_timeout_s: float,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._host = host
        self._ready_timeout_s = ready_timeout_s
        self._changed = changed
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._watcher.start()

    def launch(self, request: LaunchRequest) -> LaunchReply:
        """Start a process and wait until it listens; the same id again answers with the first.

        Raises:
            LaunchError: it ended or kept silent; or its job was stopped on this node.
        """
        with self._lock:
            job = self._job(request.job_id)
            entry = job.entries.get(request.process_id)
            is_first = entry is None
            if entry is None:
                if job.stopped or self._closed.is_set():
                    raise LaunchError(f"job {request.job_id} was stopped on this node")
                entry = _Entry(request, _label(request))
                job.entries[request.process_id] = entry
        if is_first:
            try:
                self._start(job, entry)
            except (ChildError, OSError) as error:
                entry.error = str(error)
            finally:
                entry.ready.set()
        entry.ready.wait(self._ready_timeout_s + 5.0)
        if entry.reply is None:
            raise LaunchError(entry.error or f"{entry.label} is still starting")
        return entry.reply

    def helper(self, job_id: str, label: str, argv: list[str]) -> Child:
        """Start a process that only works for this node, such as the profiler's.

        Raises:
            LaunchError: the node is stopping.
        """
        if self._closed.is_set():
            raise LaunchError("the node is stopping")
        return spawn(label, argv, directory=self._directory / job_id, environment=one_thread())

    def job_directory(self, job_id: str) -> Path:
        """The folder of a job's files on this node, made if need be."""
        with self._lock:
            directory = self._job(job_id).directory
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def statuses(self) -> list[ProcessStatus]:
        """The processes of all jobs that have not been stopped."""
        with self._lock:
            entries = [e for j in self._jobs.values() if not j.stopped for e in j.entries.values()]
        return [status for entry in entries if (status := _status(entry)) is not None]

    def stop_job(self, job_id: str, grace_s: float) -> int:
        """Stop a job's processes, and start none for it any more; how many were running."""
        with self._lock:
            job = self._job(job_id)
            job.stopped = True
            entries = list(job.entries.values())
        children = [e.child for e in entries if e.child is not None]
        running = [child for child in children if child.poll() is None]
        stop_all(children, grace_s)
        for child in running:
            _end_group(child)
        self._changed()
        return len(running)

    def read_log(self, process_id: str, offset: int, limit: int) -> ReadLogReply | None:
        """Bytes of a log; None for an unknown process."""
        with self._lock:
            jobs = self._jobs.values()
            entry = next((j.entries[process_id] for j in jobs if process_id in j.entries), None)
        if entry is None:
            return None
        child = entry.child
        if child is None:
            return ReadLogReply(ended=entry.ready.is_set())
        ended = child.poll() is not None  # asked first: what it wrote is there by then
        size = child.log.stat().st_size if child.log.exists() else 0
        offset = min(offset, size)
        with child.log.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(min(limit or _READ_LIMIT, _READ_LIMIT))
        end = offset + len(data)
        return ReadLogReply(data=data, next_offset=end, ended=ended and end >= size)

    def close(self, grace_s: float) -> None:
        """Stop everything."""
        self._closed.set()
        with self._lock:
            for job in self._jobs.values():
                job.stopped = True
            children = [
                entry.child
                for job in self._jobs.values()
                for entry in job.entries.values()
                if entry.child is not None
            ]
        stop_all(children, grace_s)
        self._watcher.join(1.0)

    def _start(self, job: _Job, entry: _Entry) -> None:
        request = entry.request
        job.directory.mkdir(parents=True, exist_ok=True)
        child = spawn(
            entry.label,
            self._argv(job, entry),
            directory=job.directory,
            environment=one_thread(),
        )
        with self._lock:
            entry.child = child
            stopped = job.stopped
        if stopped:  # between the check and the start
            child.stop(0.5)
            raise ChildError(f"job {request.job_id} was stopped on this node")
        child.wait_ready(self._ready_timeout_s, lambda: job.stopped)
        entry.reply = LaunchReply(
            address=child.address, rendezvous=str(child.facts.get("rendezvous", "")), pid=child.pid
        )
        _log.info("job %s: %s runs (pid %d)", request.job_id, entry.label, child.pid)

    def _argv(self, job: _Job, entry: _Entry) -> list[str]:
        request, bind = entry.request, f"{self._host}:0"
        if request.role == SHARD:
            shards = max(request.job.servers.shards, request.index + 1)
            return module_argv(
                "ps.server",
                *("--bind", bind, "--shard", str(request.index), "--shards", str(shards)),
            )
        path = job.directory / f"{entry.label.replace(' ', '-')}.launch"
        path.write_bytes(request.SerializeToString())
        return module_argv("workers.stage", "--launch", str(path), "--bind", bind)

    def _job(self, job_id: str) -> _Job:
        if job_id not in self._jobs:
            self._jobs[job_id] = _Job(self._directory / job_id)
            ended = [name for name, job in self._jobs.items() if job.stopped]
            for name in ended[: max(0, len(ended) - _KEPT_JOBS)]:
                shutil.rmtree(self._jobs.pop(name).directory, ignore_errors=True)
        return self._jobs[job_id]

    def _watch(self) -> None:
        """Notice ends at once: a job whose process died is told to its owner within a second."""
        while not self._closed.wait(_WATCH_S):
            with self._lock:
                entries = [e for j in self._jobs.values() for e in j.entries.values()]
            for entry in entries:
                if entry.child is None or entry.ended is not None:
                    continue
                entry.ended = entry.child.poll()
                if entry.ended is not None:
                    self._changed()


def one_thread() -> dict[str, str]:
    """A unit is one core: libraries must not take more."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def wait_for(child: Child, timeout_s: float, stop: Callable[[], bool]) -> int | None:
    """Wait for a process to end; None, and it is killed, when it took too long or `stop`."""
    deadline = time.monotonic() + timeout_s
    while (code := child.poll()) is None:
        if stop() or time.monotonic() > deadline:
            child.stop(1.0)
            _end_group(child)
            return None
        time.sleep(0.05)
    child.stop(0.0)
    return code


def _status(entry: _Entry) -> ProcessStatus | None:
    child = entry.child
    if child is None:
        return None
    code = child.poll()
    return ProcessStatus(
        process_id=entry.request.process_id,
        job_id=entry.request.job_id,
        role=_ROLES.get(entry.request.role, ""),
        label=entry.label,
        pid=child.pid,
        running=code is None,
        exit_code=code or 0,
        last_lines=last_lines(child.log, limit=4096) if code is not None else "",
    )


def _label(request: LaunchRequest) -> str:
    if request.role == SHARD:
        return f"shard {request.index}"
    return f"stage {request.index} worker {request.rank}"


def _end_group(child: Child) -> None:
    """End what the process itself had started: `spawn` made it the leader of a group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
