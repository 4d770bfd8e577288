"""A table of one process: what was asked for, and the engine's."""

from dataclasses import dataclass, field

from protos.parameter_server_pb2 import TableSpec
from ps.engine import _native
from ps.errors import ConflictError
from ps.table.buckets import Share
from ps.table.spec import make_table


@dataclass(frozen=True, slots=True)
class Table:
    """A table and what was asked of it.

    Attributes:
        share: which share of its keys is here; None where nobody has said, or a routing says.
    """

    spec: TableSpec
    native: _native.Table
    # Cuts that saves have made of just these rows: a delta can begin at one of them.
    cuts: set[int] = field(default_factory=set, compare=False)
    share: Share | None = None

    @classmethod
    def make(cls, spec: TableSpec, directory: str = "") -> "Table":
        """An empty one; see `make_table`. The spec may say its share."""
        plain = without_share(spec)
        return cls(plain, make_table(plain, directory), share=Share.of(spec.share))

    @property
    def journaled(self) -> bool:
        """Whether its pushes go to the journal before they are acknowledged."""
        return self.spec.durability in ("log", "replica")

    @property
    def journal(self) -> str:
        """The journal that must know of it: by the durability that it gives."""
        return "log" if self.spec.durability == "checkpoint" else self.spec.durability

    @property
    def told(self) -> TableSpec:
        """Its spec with its share, for whoever is to make the same."""
        spec = without_share(self.spec)
        if self.share is not None:
            spec.share = self.share.number
        return spec

    def check_share(self, number: int) -> None:
        """Refuse a request that takes this shard to have other keys than it has.

        Args:
            number: of the share, or any version of a routing.

        Raises:
            ConflictError: its sender names other shards, or in another order, than whoever made
                or loaded the table.
        """
        asked = Share.of(number)
        if asked is not None and self.share not in (None, asked):
            raise ConflictError(
                f"table {self.spec.name!r}: this is {self.share}, and the request takes it for "
                f"{asked}; expected the addresses that the table was made or loaded with, all of "
                "them in their order"
            )


def without_share(spec: TableSpec) -> TableSpec:
    """A copy of a spec as it is on all shards."""
    plain = TableSpec()
    plain.CopyFrom(spec)
    plain.ClearField("share")
    return plain
