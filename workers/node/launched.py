"""What a node knows of a job and of each of its processes."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

from chassis import scratch
from chassis.bounded_log import BoundedLog
from chassis.files import replace_file
from chassis.process import Child, last_lines
from chassis.security import TOKEN
from protos.node_pb2 import SHARD, STAGE, LaunchReply, LaunchRequest
from protos.scheduler_pb2 import ProcessStatus
from workers.node import users
from workers.node.restart import keeps_rows

HOME = "home"
_ROLES = {SHARD: "shard", STAGE: "stage"}


@dataclass(slots=True)
class Entry:
    """One process, from the request on."""

    request: LaunchRequest
    label: str
    ready: threading.Event = field(default_factory=threading.Event)  # or failed
    child: Child | None = None
    log: BoundedLog | None = None
    reply: LaunchReply | None = None
    error: str = ""
    failed_with: int | None = None  # its exit code, where it ended before it was ready
    ended: int | None = None
    restarts: list[float] = field(default_factory=list)  # when, time.monotonic()
    starter: threading.Thread | None = None  # while it is being started again
    note: str = ""  # why it was not
    given_up: bool = False  # its attempt goes on without it
    gpu: str = ""  # what a stage worker on a GPU sees
    launch_file: Path | None = None  # of a stage worker, which reads it again
    out_of_memory: bool = False
    stopped_since: float | None = None  # time.monotonic(), where a signal has stopped it

    @property
    def holds_gpu(self) -> bool:
        """Whether a GPU is in use by it."""
        ended = self.child.poll() is not None if self.child is not None else bool(self.error)
        return bool(self.gpu) and not ended

    def exit_code(self) -> int | None:
        """How it ended; None while it runs or will again."""
        if self.child is None or (self.ended is None and self.returns):
            return None
        return self.child.poll()

    @property
    def returns(self) -> bool:
        """Whether it is a shard that may be started again when it dies."""
        is_shard = self.request.role == SHARD and not self.given_up
        return is_shard and self.reply is not None and keeps_rows(self.request)

    def status(self) -> ProcessStatus | None:
        """What to tell the scheduler; None before it was started."""
        child = self.child
        if child is None:
            return None
        code = self.exit_code()
        return ProcessStatus(
            process_id=self.request.process_id,
            job_id=self.request.job_id,
            role=_ROLES.get(self.request.role, ""),
            label=self.label,
            pid=child.pid,
            running=code is None,
            exit_code=code or 0,
            last_lines=last_lines(child.log, limit=4096) if code is not None else "",
            restarts=len(self.restarts),
            note=self.note,
            out_of_memory=self.out_of_memory,
            attempt=self.request.attempt,
        )


@dataclass(slots=True)
class Job:
    """An attempt's part on this node.

    Attributes:
        scratch: what its processes on this host share, under whichever node.
        token: that its processes hold in place of the node's; empty: that one.
        user: that its processes run as; None for the node's own.
    """

    directory: Path
    scratch: Path
    token: str = ""
    user: int | None = None
    entries: dict[str, Entry] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)
    preparing: threading.Lock = field(default_factory=threading.Lock)
    has_code: bool = False  # its user owns it
    over: bool = False  # its user may be another's

    @property
    def stopped(self) -> bool:
        """Whether it has ended: nothing is started for it any more."""
        return self.stopping.is_set()

    @property
    def home(self) -> Path:
        """Where its processes write; what others write of them lies in `directory`."""
        return self.directory / HOME if self.user is not None else self.directory

    @property
    def shards(self) -> Path:
        """What its shards keep here, while it runs."""
        return self.home / "shards"

    @property
    def code(self) -> Path:
        """The code that it brought, while it runs."""
        return self.directory / "code"

    def environment(self) -> dict[str, str]:
        """What its processes find: what they share, and their token, in a file for them alone."""
        found = {scratch.VARIABLE: str(self.scratch)}
        path = self.home / "token"
        if self.user is not None:
            found |= users.environment(self.home, self.user)
            found |= users.credentials(self.home, self.user)
        if self.token:
            replace_file(path, self.token, private=True, owner=self.user)
            found[TOKEN] = str(path)
        return found


def label_of(request: LaunchRequest) -> str:
    """The process's name for people, unique in its job."""
    again = f", generation {request.generation}" if request.generation else ""
    if request.role == SHARD:
        return f"shard {request.index}{again}"
    return f"stage {request.index} worker {request.rank}{again}"
