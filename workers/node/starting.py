"""How a process of a job is begun on a node: its folders, user, code and environment.

Workers, and what profiles them, are forked where that can be; shards are processes of their own.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from chassis import scratch
from chassis.bounded_log import BoundedLog
from chassis.files import replace_file
from chassis.forking import ForkError, ForkServer
from chassis.process import Child, module_argv, spawn
from protos.node_pb2 import STAGE, LaunchRequest
from workers.device.units import compute_environment
from workers.model.code.brought import CodeCache
from workers.node.launched import HOME, Entry, Job
from workers.node.restart import shard_argv
from workers.node.users import NoUserError, Users, give, own, passable

_log = logging.getLogger("heterps.node")


class Starter:
    """Begins processes.

    Args:
        directory: the node's; files of jobs are in DIRECTORY/JOB_ID.
        forks: what workers are forked from, closed with this.
        code: where the code that jobs bring is fetched; without it they must be on a shared disk.
        users: that jobs run as, each as one of its own; without, all as the node's.
    """

    def __init__(
        self, directory: Path, forks: ForkServer, code: CodeCache | None, users: Users | None
    ) -> None:
        self._directory = directory
        self._forks = forks
        self._code = code
        self._users = users
        if users is not None:
            passable(directory)

    def prepare(self, job: Job) -> None:
        """Make an attempt's folders, and find it a user where it is to have one, for good.

        Raises:
            NoUserError: none is free, or it needs none any more.
        """
        with job.preparing:
            job.directory.mkdir(parents=True, exist_ok=True)
            if self._users is None or job.user is not None:
                return
            if job.stopped:
                raise NoUserError("the job was stopped on this node")
            for folder in (job.directory.parent, job.directory):
                if folder != self._directory:
                    passable(folder)
            user = self._users.take()
            own(job.directory / HOME, user)
            job.user = user

    def begin(
        self,
        job: Job,
        entry: Entry,
        bind: str,
        log: BoundedLog,
        besides: Mapping[str, str],
    ) -> Child:
        """Begin the process of an entry, with variables of the environment besides those of all.

        Raises:
            ChildError, CodeError, OSError: it did not begin.
        """
        request, threads = entry.request, 1
        if request.role == STAGE and request.index < len(request.stages):
            threads = request.stages[request.index].threads or 1
        environment = compute_environment(threads) | job.environment() | dict(besides)
        if request.role == STAGE:
            arguments = self._worker_arguments(job, entry, bind)
            return self.fork(job, entry.label, "workers.stage", arguments, environment, log)
        return spawn(
            entry.label,
            shard_argv(entry.request, bind, place_of(job, entry.request)),
            directory=job.home,
            environment=environment,
            log=log,
            user=job.user,
        )

    def fork(
        self,
        job: Job,
        label: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: BoundedLog,
    ) -> Child:
        """A process of a module that `workers.forked` imports: started where no fork can be."""
        try:
            return self._forks.spawn(
                label,
                f"{module}.__main__",
                arguments,
                directory=job.home,
                environment=environment,
                log=log,
                user=job.user,
            )
        except ForkError as error:
            _log.warning("%s is started by itself: %s", label, error)
        return spawn(
            label,
            module_argv(module, *arguments),
            directory=job.home,
            environment=environment,
            log=log,
            user=job.user,
        )

    def _worker_arguments(self, job: Job, entry: Entry, bind: str) -> list[str]:
        request = entry.request
        path = job.directory / f"{entry.label.replace(' ', '-')}.launch"
        if self._code is not None:
            request.job.CopyFrom(self._code.bring(request.job, job.code))
            self._hand_code(job)
        replace_file(path, request.SerializeToString(), owner=job.user)
        entry.launch_file = path
        return ["--launch", str(path), "--bind", bind]

    def _hand_code(self, job: Job) -> None:
        """Let the job's user have the code, before anything runs that could change it."""
        with job.preparing:
            if job.user is not None and job.code.exists() and not job.has_code:
                give(job.code, job.user)
                job.has_code = True

    def hand(self, job: Job, folder: Path) -> None:
        """Let an attempt's processes have a folder.

        Raises:
            NoUserError: they would run as a user of their own, and none is free.
        """
        self.prepare(job)
        if job.user is not None:
            give(folder, job.user)

    def forget(self, job: Job) -> None:
        """Remove what the shards of a job that was stopped have kept, its code, what it shared."""
        with job.preparing:
            if self._users is not None and job.user is not None and not job.over:
                job.over = True  # the next job may have the user: once
                self._users.end(job.user)
                shutil.rmtree(job.home, ignore_errors=True)
        shutil.rmtree(job.shards, ignore_errors=True)
        shutil.rmtree(job.code, ignore_errors=True)
        scratch.remove_unused(job.scratch)

    def warm(self) -> None:
        """Have what workers are forked from be there, before there is one."""
        self._forks.warm()

    def close(self) -> None:
        """End what workers are forked from."""
        self._forks.close()


def fork_server(directory: Path) -> ForkServer:
    """What a node's workers and profilers are forked from, not started; logs in `directory`."""
    return ForkServer("workers.forked", directory, compute_environment())


def place_of(job: Job, request: LaunchRequest) -> Path:
    """What a shard keeps: its own alone, of however many there were with its index."""
    return job.shards / request.process_id
