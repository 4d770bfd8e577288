"""The processes of jobs on one node: started once, watched, stopped, their logs readable.

A shard that keeps its rows and dies is started again at its place; nobody is told that it ended.
"""

import logging
import os
import shutil
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path

from chassis import scratch
from chassis.bounded_log import BoundedLog
from chassis.exits import DAMAGED, exit_code_of
from chassis.files import lacks_room, replace_file
from chassis.forking import ForkServer
from chassis.logs import log_scope
from chassis.loops import Loops, for_each
from chassis.process import (
    Child,
    ChildError,
    describe_exit,
    log_path,
    stop_all,
)
from protos.node_pb2 import SHARD, STAGE, LaunchReply, LaunchRequest, ReadLogReply
from protos.scheduler_pb2 import END_DISK_FULL, ProcessStatus
from workers.device.units import VISIBLE, compute_environment, least_used
from workers.model.code.brought import CodeCache, CodeError
from workers.model.saved.unfinished import Unfinished
from workers.node.launched import HOME, Entry, Job, label_of
from workers.node.oom import OomKills
from workers.node.restart import RestartRule
from workers.node.starting import Starter, fork_server, place_of
from workers.node.stopped import stands_still
from workers.node.users import NoUserError, Users

_WATCH_S = 0.1
_KEPT_JOBS = 100  # ended jobs whose logs stay readable
_KEPT_ORDERS = 100_000  # jobs of which it is known that they were stopped
_READ_LIMIT = 1 << 20
_log = logging.getLogger("heterps.node")


class LaunchError(RuntimeError):
    """A process that did not start, worded for the job's owner.

    Attributes:
        exit_code: how it ended, or would have; None when it was never ready, or not begun.
    """

    def __init__(self, text: str, exit_code: int | None = None) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def told_of(error: OSError, folder: Path) -> str:
    """What it says of a file in `folder`, where it does not say which."""
    return str(error) if error.filename else f"{folder}: {error}"


class Processes:
    """Every process of every job on this node.

    Args:
        directory: logs and launch files go to DIRECTORY/JOB_ID.
        host: where the processes listen.
        ready_timeout_s: how long a process may take to listen.
        changed: called when a process has ended or was started again.
        rule: for shards that die.
        code: where the code that jobs bring is fetched; without it they must be on a shared disk.
        gpus: that workers get one of each, as CUDA_VISIBLE_DEVICES names them.
        users: that jobs run as, each as one of its own; without, all as the node's.
        loops: of the process, that the watcher is to be one of.
        forks: what workers are forked from, closed with this; without, one that starts with the
            first of them.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        ready_timeout_s: float,
        changed: Callable[[], None] = lambda: None,
        rule: RestartRule | None = None,
        code: CodeCache | None = None,
        gpus: Sequence[str] = (),
        users: Users | None = None,
        loops: Loops | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        self._directory = directory
        self._host = host
        self._ready_timeout_s = ready_timeout_s
        self._changed = changed
        self._rule = rule or RestartRule()
        self._gpus = tuple(gpus)
        self._alone = users is not None  # each job as a user of its own
        self._starter = Starter(directory, forks or fork_server(directory), code, users)
        self._lock = threading.Lock()
        self._jobs: OrderedDict[tuple[str, int], Job] = OrderedDict()  # by attempt
        self._over: OrderedDict[str, int] = OrderedDict()  # by job, the last attempt stopped
        self._closed = threading.Event()
        scratch.sweep()
        self._oom_kills = OomKills()
        self._watcher = (loops or Loops()).start("watch", self._watch, _WATCH_S)

    def launch(self, request: LaunchRequest) -> LaunchReply:
        """Start a process and wait until it listens; the same id again answers with the first.

        Raises:
            LaunchError: it ended or kept silent; or its attempt, or a later one, was stopped on
                this node.
        """
        with self._lock:
            job = self._job(request.job_id, request.attempt, request.token)
            request.ClearField("token")  # its processes find it elsewhere
            entry = job.entries.get(request.process_id)
            is_first = entry is None
            if entry is None:
                over = self._over.get(request.job_id, -1)
                if job.stopped or self._closed.is_set() or request.attempt <= over:
                    raise LaunchError(f"job {request.job_id} was stopped on this node")
                entry = Entry(request, label_of(request))
                job.entries[request.process_id] = entry
        if is_first:
            try:
                with log_scope(job=request.job_id):
                    self._start(job, entry)
            except ChildError as error:
                entry.error, entry.failed_with = str(error), error.exit_code
                if request.role == SHARD and error.exit_code == exit_code_of(END_DISK_FULL):
                    # It may have had no room to say so, either.
                    entry.error = f"{entry.error.rstrip()}\n{job.directory}: has no room for it"
            except (CodeError, NoUserError) as error:
                entry.error = str(error)
            except OSError as error:
                entry.error = told_of(error, job.directory)
                entry.failed_with = exit_code_of(END_DISK_FULL) if lacks_room(error) else None
            finally:
                entry.ready.set()
        entry.ready.wait(self._ready_timeout_s + 5.0)
        if entry.reply is None:
            text = entry.error or f"{entry.label} is still starting"
            raise LaunchError(text, entry.failed_with)
        return entry.reply

    def follow(self, scheduler: str) -> None:
        """Let the workers that run find another scheduler: they read their request again."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if not job.stopped]
            entries = [(job, entry) for job in jobs for entry in job.entries.values()]
        for job, entry in entries:
            entry.request.scheduler = scheduler
            if entry.launch_file is not None:
                told = entry.request.SerializeToString()
                replace_file(entry.launch_file, told, owner=job.user)

    def warm(self) -> None:
        """Have what workers are forked from be there, before there is one."""
        self._starter.warm()

    def helper(
        self,
        job_id: str,
        attempt: int,
        token: str,
        label: str,
        module: str,
        arguments: Sequence[str],
        threads: int = 1,
    ) -> Child:
        """Start a process that only works for this node, such as the profiler's.

        Raises:
            LaunchError: the node is stopping.
        """
        if self._closed.is_set():
            raise LaunchError("the node is stopping")
        with self._lock:
            job = self._job(job_id, attempt, token)
        self._starter.prepare(job)
        log = BoundedLog(log_path(self._directory / job_id, label))
        environment = compute_environment(threads) | job.environment()
        return self._starter.fork(job, label, module, arguments, environment, log)

    def hand(self, job_id: str, attempt: int, folder: Path) -> None:
        """Let an attempt's processes on this node have a folder.

        Raises:
            LaunchError: they would run as a user of their own, and none is free.
        """
        with self._lock:
            job = self._job(job_id, attempt)
        try:
            self._starter.hand(job, folder)
        except NoUserError as error:
            raise LaunchError(str(error)) from None

    def job_directory(self, job_id: str, attempt: int) -> Path:
        """The folder of an attempt's files on this node, made if need be."""
        with self._lock:
            directory = self._job(job_id, attempt).directory
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def statuses(self) -> list[ProcessStatus]:
        """The processes of all jobs that have not been stopped."""
        with self._lock:
            entries = [e for j in self._jobs.values() if not j.stopped for e in j.entries.values()]
        return [status for entry in entries if (status := entry.status()) is not None]

    def stop_job(self, job_id: str, attempt: int, grace_s: float) -> int:
        """Stop a job's processes, up to an attempt, and start none any more; how many ran."""
        with self._lock:
            self._over[job_id] = max(attempt, self._over.pop(job_id, -1))
            while len(self._over) > _KEPT_ORDERS:
                self._over.popitem(last=False)
            self._job(job_id, attempt)
            jobs = [j for (name, n), j in self._jobs.items() if name == job_id and n <= attempt]
            for job in jobs:
                job.stopping.set()
            entries = [entry for job in jobs for entry in job.entries.values()]
        ran = _stop(entries, grace_s)
        for job in jobs:
            self._forget(job)
        self._changed()
        return ran

    def stop_some(self, job_id: str, attempt: int, names: Collection[str], grace_s: float) -> int:
        """Stop some processes of an attempt, which goes on; how many ran."""
        with self._lock:
            job = self._jobs.get((job_id, attempt))
            if job is None:
                return 0
            entries = [entry for name, entry in job.entries.items() if name in names]
            for entry in entries:
                entry.given_up = True
        for entry in entries:
            entry.ready.wait(grace_s)  # one that is being started
        ran = _stop(entries, grace_s)
        for entry in entries:
            if entry.request.role == SHARD:
                shutil.rmtree(place_of(job, entry.request), ignore_errors=True)
        self._changed()
        return ran

    def remove_unfinished(self, output: str, attempt: int) -> None:
        """Remove the half of a model that an attempt has left, of which nothing runs anywhere.

        Not where jobs run as users of their own: a job says where its model lies, and could name
        another user's.
        """
        if not self._alone:
            Unfinished.of(Path(output)).remove(attempt)

    def busy(self) -> bool:
        """Whether anything of a job runs, or is about to."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if not job.stopped]
            entries = [entry for job in jobs for entry in job.entries.values()]
        return any(not entry.error and entry.exit_code() is None for entry in entries)

    def read_log(self, process_id: str, offset: int, limit: int) -> ReadLogReply | None:
        """Bytes of a log; None for an unknown process."""
        with self._lock:
            jobs = self._jobs.values()
            entry = next((j.entries[process_id] for j in jobs if process_id in j.entries), None)
        if entry is None:
            return None
        if entry.child is None or entry.log is None:
            return ReadLogReply(ended=entry.ready.is_set())
        ended = entry.exit_code() is not None  # asked first: what it wrote is there by then
        data, end, whole = entry.log.read(offset, min(limit or _READ_LIMIT, _READ_LIMIT))
        return ReadLogReply(data=data, next_offset=end, ended=ended and whole)

    def close(self, grace_s: float) -> None:
        """Stop everything."""
        self._closed.set()
        with self._lock:
            jobs = list(self._jobs.values())
            for job in jobs:
                job.stopping.set()
            entries = [entry for job in jobs for entry in job.entries.values()]
        _stop(entries, grace_s)
        self._starter.close()
        self._watcher.close(1.0)
        for job in jobs:
            self._forget(job)

    def _start(self, job: Job, entry: Entry) -> None:
        child = self._spawn(job, entry, f"{self._host}:0")
        told = {name: str(child.facts.get(name, "")) for name in ("rendezvous", "contents")}
        entry.reply = LaunchReply(address=child.address, pid=child.pid, **told)
        _log.info("job %s: %s runs (pid %d)", entry.request.job_id, entry.label, child.pid)

    def _spawn(self, job: Job, entry: Entry, bind: str) -> Child:
        request = entry.request
        self._starter.prepare(job)
        if entry.log is None:
            entry.log = BoundedLog(log_path(job.directory, entry.label))
        child = self._starter.begin(job, entry, bind, entry.log, self._own_gpu(entry))
        with self._lock:
            entry.child = child
            stopped = job.stopped or entry.given_up
        self._changed()
        if stopped:  # while it was started: nobody else stops what was not there yet
            child.stop(0.5)
            what = f"job {request.job_id}" if job.stopped else entry.label
            raise ChildError(f"{what} was stopped on this node")
        return child.wait_ready(self._ready_timeout_s, lambda: job.stopped)

    def _own_gpu(self, entry: Entry) -> dict[str, str]:
        """What lets a worker on a GPU see one alone, that no other has where there are enough."""
        request = entry.request
        on_gpu = list(request.devices[request.index : request.index + 1]) == ["cuda"]
        if request.role != STAGE or not on_gpu or not self._gpus:
            return {}
        with self._lock:
            entries = [e for job in self._jobs.values() for e in job.entries.values()]
            entry.gpu = least_used(self._gpus, [e.gpu for e in entries if e.holds_gpu])
        return {VISIBLE: entry.gpu}

    def _forget(self, job: Job) -> None:
        """Remove what is left of a job that was stopped."""
        for entry in list(job.entries.values()):
            starter = entry.starter
            if starter is not None:  # it sees that the job was stopped
                starter.join(5.0)
        self._starter.forget(job)

    def _job(self, job_id: str, attempt: int, token: str = "") -> Job:
        key = job_id, attempt
        if key not in self._jobs:
            folder = self._directory / job_id
            directory = folder / f"attempt-{attempt}" if attempt > 1 else folder
            own = directory / HOME / "scratch"
            shared = own if self._alone else scratch.folder_of(job_id, attempt)
            self._jobs[key] = Job(directory, shared)
            # The folder of a job's first attempt holds those of the others.
            runs = {name for (name, _), job in self._jobs.items() if not job.stopped}
            ended = [k for k, job in self._jobs.items() if job.stopped and k[0] not in runs]
            for old in ended[: max(0, len(ended) - _KEPT_JOBS)]:
                shutil.rmtree(self._jobs.pop(old).directory, ignore_errors=True)
        job = self._jobs[key]
        job.token = job.token or token
        return job

    def _watch(self) -> None:
        """Notice ends at once: a job whose process died is told to its owner within a second."""
        self._oom_kills.look()
        with self._lock:
            pairs = [(j, e) for j in self._jobs.values() for e in j.entries.values()]
        for_each(pairs, lambda pair: self._look(*pair))

    def _look(self, job: Job, entry: Entry) -> None:
        if entry.child is None or entry.ended is not None or entry.starter is not None:
            return
        code = entry.child.poll()
        with log_scope(job=entry.request.job_id):
            if code is None and stands_still(entry):
                _log.warning("%s was stopped and not continued: it is killed", entry.label)
                os.kill(entry.child.pid, signal.SIGKILL)
            if code is not None and not self._revive(job, entry, code):
                killed = code == -signal.SIGKILL and not job.stopped
                entry.out_of_memory = killed and self._oom_kills.lately()
                entry.ended = code
                self._changed()

    def _revive(self, job: Job, entry: Entry, code: int) -> bool:
        """Have a process that ended started again, where that may be."""
        if job.stopped or entry.given_up or entry.request.role != SHARD or entry.reply is None:
            return False
        if not entry.returns:
            entry.note = "cannot be started again: its rows are lost, as servers.durability is none"
            return False
        if code == DAMAGED:
            entry.note = "was not started again: what it kept is damaged"
            return False
        now = time.monotonic()
        pause = self._rule.pause_before(entry.restarts, now)
        if pause is None:
            entry.note = self._rule.exhausted
            return False
        _log.warning(
            "job %s: %s (pid %d) ended %s; it is started again with the rows it kept",
            *(entry.request.job_id, entry.label, entry.child.pid if entry.child else 0),
            describe_exit(code),
        )
        with self._lock:  # who stops the job waits for a thread that it finds, which has to run
            if job.stopping.is_set():
                return False
            entry.restarts.append(now)
            entry.starter = threading.Thread(
                target=copy_context().run,
                args=(self._start_again, job, entry, pause),
                name="start again",
                daemon=True,
            )
            entry.starter.start()
        return True

    def _start_again(self, job: Job, entry: Entry, pause: float) -> None:
        """Start a shard at the address it had; where that fails, the watcher sees another end."""
        assert entry.child is not None
        assert entry.reply is not None
        try:
            if not job.stopping.wait(pause) and not entry.given_up:
                entry.child.stop(0.0)  # closes what is left of the dead one
                child = self._spawn(job, entry, entry.reply.address)
                _log.info(
                    "job %s: %s runs again (pid %d)", entry.request.job_id, entry.label, child.pid
                )
        except (ChildError, OSError) as error:
            _log.warning("job %s: %s", entry.request.job_id, error)
        finally:
            entry.starter = None
            self._changed()


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


def _stop(entries: Sequence[Entry], grace_s: float) -> int:
    """Stop processes, and what they had started; how many ran."""
    children = [entry.child for entry in entries if entry.child is not None]
    running = [child for child in children if child.poll() is None]
    stop_all(children, grace_s)
    for child in running:
        _end_group(child)
    return len(running)


def _end_group(child: Child) -> None:
    """End what the process itself had started: `spawn` made it the leader of a group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
