"""What nodes know an attempt at a job by, and one of its processes."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from protos.job_pb2 import DataSpec
from protos.scheduler_pb2 import NodeStatus, PlacedProcess
from scheduler.state import nodes as registry


@dataclass(frozen=True, slots=True)
class AttemptId:
    """One attempt at a job: nodes take each attempt once, and orders of the latest term alone.

    Attributes:
        token: that its processes hold and ask for; empty: that of their nodes.
    """

    job_id: str
    number: int
    term: int
    token: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a job: what it is, and the node (or standing shard) that it lives with.

    Attributes:
        shares: it is a worker without a unit of its own: see `sharing`.
        contents: of the splits that it reads, a line each; empty: not known.
    """

    process_id: str
    label: str
    role: int
    index: int
    rank: int
    node: NodeStatus
    address: str = ""
    rendezvous: str = ""
    pid: int = 0
    shares: bool = False
    contents: str = ""

    @property
    def standing(self) -> bool:
        """Whether it is a standing shard, which the job found and will leave running."""
        return self.node.kind == registry.SHARD

    @property
    def returns(self) -> bool:
        """Whether it is a standing shard that comes back with its rows when it is restarted."""
        return self.standing and self.node.keeps_rows

    @property
    def place(self) -> str:
        """Where it runs, for people."""
        if self.standing:
            return f"standing shard {self.node.node_id} at {self.node.address}"
        pid = f"pid {self.pid} on " if self.pid else ""
        return f"{pid}node {self.node.node_id}, {self.node.type} at {self.node.address}"

    def runs_on(self, status: NodeStatus | None) -> bool:
        """Whether its node tells that it runs."""
        return status is not None and any(
            p.process_id == self.process_id and p.running for p in status.processes
        )

    @classmethod
    def of(cls, placed: PlacedProcess) -> "Process":
        """Read what was kept of it."""
        return cls(**{field.name: getattr(placed, field.name) for field in fields(cls)})

    def to_message(self) -> PlacedProcess:
        """What to keep of it."""
        node = NodeStatus()
        node.CopyFrom(self.node)
        node.ClearField("processes")
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return PlacedProcess(**own | {"node": node})


def other_contents(workers: Iterable[Process], data: DataSpec) -> str:
    """What to say of workers that read other data than others; else "".

    Samples would count twice, or never, and what is measured would be of a mixture.
    """
    given = {"train": data.train, "valid": data.valid, "test": data.test}
    splits = [split for split, pattern in given.items() if pattern]
    first: dict[str, tuple[str, Process]] = {}
    for worker in workers:
        # Of held-out splits only those who read them tell.
        told = zip(splits, worker.contents.split("\n"), strict=False)
        for split, contents in ((split, own) for split, own in told if own):
            expected, before = first.setdefault(split, (contents, worker))
            if contents != expected:
                return (
                    f"data.{split}: {given[split]}: {worker.label} ({worker.place}) found other "
                    f"contents than {before.label} ({before.place}); expected the same files on "
                    "all nodes, which stay as they are while a job starts"
                )
    return ""
