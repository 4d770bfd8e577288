"""A table of one process: what was asked for, and the engine's."""

from dataclasses import dataclass, field

from protos.parameter_server_pb2 import TableSpec
from ps.engine import _native
from ps.table.spec import make_table


@dataclass(frozen=True, slots=True)
class Table:
    """A table and what was asked of it."""

    spec: TableSpec
    native: _native.Table
    # Cuts that saves have made of just these rows: a delta can begin at one of them.
    cuts: set[int] = field(default_factory=set, compare=False)

    @classmethod
    def make(cls, spec: TableSpec, directory: str = "") -> "Table":
        """An empty one; see `make_table`."""
        return cls(spec, make_table(spec, directory))

    @property
    def journaled(self) -> bool:
        """Whether its pushes go to the journal before they are acknowledged."""
        return self.spec.durability in ("log", "replica")

    @property
    def journal(self) -> str:
        """The journal that must know of it: by the durability that it gives."""
        return "log" if self.spec.durability == "checkpoint" else self.spec.durability
