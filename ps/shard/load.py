"""Tables that a shard takes from a save: read beside its own, then put in their place."""

import logging
from dataclasses import dataclass, replace

from protos import parameter_server_pb2 as pb
from ps.checkpoint.tables import Chain, load_tables, read_save
from ps.errors import CheckpointError
from ps.shard.state import ShardState
from ps.table.applied import Applied
from ps.table.buckets import Share
from ps.table.spec import describe_difference
from ps.table.table import Table

_log = logging.getLogger("heterps.ps")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Rows that have been read and are in nobody's use yet.

    Attributes:
        place: they come from.
        tables: by name.
        applied: what had been applied of each client and series.
        positions: client -> where its reader was.
        lasting: tables with a durability are among them.
    """

    place: str
    tables: dict[str, Table]
    applied: Applied
    positions: dict[str, str]
    lasting: bool

    @property
    def rows(self) -> int:
        """In all tables."""
        return sum(table.native.counters()["rows"] for table in self.tables.values())

    @property
    def lasting_tables(self) -> bool:
        """Whether some of them survive the shard."""
        return any(table.spec.durability for table in self.tables.values())

    def check(self, state: ShardState) -> None:
        """Compare them with the tables in use, and see that what survives the shard can be kept.

        Raises:
            CheckpointError: one has another spec.
            NoRoomError: the disk has no room for them.
        """
        for name, table in self.tables.items():
            have = state.tables.get(name)
            if have is not None and have.spec != table.spec:
                raise CheckpointError(
                    f"{self.place}: table {name!r} differs from the one in use: "
                    f"{describe_difference(have.spec, table.spec)}"
                )
        if self.lasting_tables:
            state.require_room(self.tables)

    def put_in_use(self, state: ShardState) -> None:
        """Put them in the place of the tables that have their names; the gate is closed.

        Raises:
            CheckpointError, NoRoomError: as of `check`; nothing was changed.
        """
        with state.lock:
            self.check(state)
            if self.lasting_tables:  # no change is kept upon what was there before
                for journal in state.journals.values():
                    journal.fall_behind()
            state.tables.update(self.tables)
            state.pushes.merge(self.applied.windows)
            if self.lasting:
                state.steps.forget(self.tables)
            state.steps.merge(
                s for s in self.applied.series if not s.tables.isdisjoint(self.tables)
            )

    def finish(self, state: ShardState) -> None:
        """What follows once the gate is open: readers' positions, and the journals.

        Raises:
            TimeoutError, OSError, RuntimeError: a journal does not take them, and so no change
                either; they are in use.
        """
        kept = set() if self.lasting else {p.client for p in state.pushes.positions()}
        state.pushes.take_positions(
            pb.Position(client=client, position=text)
            for client, text in self.positions.items()
            if client not in kept
        )
        if self.lasting_tables:
            state.renew_journals()
        _log.info("loaded %d rows of %d tables from %s", self.rows, len(self.tables), self.place)


def read_rows(
    state: ShardState,
    place: str,
    share: Share,
    *,
    save: str = "",
    lasting: bool = True,
    rename: pb.Rename | None = None,
) -> Loaded:
    """Read the rows of the shard's buckets; its own tables stay as they are.

    Args:
        state: of the shard.
        place: of the checkpoint, path or URL.
        share: what the tables are to have here, unless a routing says.
        save: that must lie there, as of `ps.checkpoint.tables.save_of`; any unless given.
        lasting: tables with a durability too.
        rename: the tables to take, under other names; all as they are unless given.

    Raises:
        ReplacedError: another save lies there.
        CheckpointError: it is damaged.
    """

    def adapt(spec: pb.TableSpec) -> pb.TableSpec | None:
        if rename is None:
            return spec
        adapted = _renamed(spec, rename, state)
        if adapted is None or not rename.weights_alone:
            return adapted
        have = state.tables.get(adapted.name)
        if have is not None and have.spec.dim != spec.dim:
            raise CheckpointError(
                f"{place}: table {spec.name!r} has rows of {spec.dim} values; expected "
                f"{have.spec.dim}, as of {adapted.name!r}"
            )
        return None if have is None else have.spec

    def read(links: Chain) -> Loaded:
        tables, applied = load_tables(
            *(links, state.owned(share), state.directory),
            adapt=adapt,
            weights_alone=rename is not None and rename.weights_alone,
        )
        tables = {name: replace(table, share=share) for name, table in tables.items()}
        if rename is not None:
            return Loaded(place, tables, Applied(), {}, lasting)
        if not lasting:
            tables = {n: t for n, t in tables.items() if not t.spec.durability}
        return Loaded(place, tables, applied, dict(links[-1][1].positions), lasting)

    return read_save(place, read, save)


def _renamed(spec: pb.TableSpec, rename: pb.Rename, state: ShardState) -> pb.TableSpec | None:
    """The spec of a table that is renamed, with what one that is there is told to keep."""
    if not spec.name.startswith(rename.from_prefix):
        return None
    adapted = pb.TableSpec()
    adapted.CopyFrom(spec)
    adapted.name = rename.to_prefix + spec.name.removeprefix(rename.from_prefix)
    have = state.tables.get(adapted.name)
    if have is not None:
        adapted.durability = have.spec.durability
        adapted.ClearField("tier")
        if have.spec.HasField("tier"):
            adapted.tier.CopyFrom(have.spec.tier)
    return adapted


def restore(
    state: ShardState,
    place: str,
    share: Share,
    *,
    save: str = "",
    lasting: bool = True,
) -> None:
    """Begin with the rows of a save, before anything is served; as of `read_rows`."""
    loaded = read_rows(state, place, share, save=save, lasting=lasting)
    loaded.put_in_use(state)
    loaded.finish(state)
