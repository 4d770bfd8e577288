"""A shard's state, and the one way to change it."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import uuid4
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from chassis.near import did_you_mean
from protos import parameter_server_pb2 as pb
from protos.codec import unpack
from ps.engine import _native
from ps.errors import TableError
from ps.shard.journal import BehindError, Buffer, Journal
from ps.shard.message import Push, take_apart
from ps.table.buckets import buckets_of, default_route, route_of
from ps.table.gate import Gate
from ps.table.gate import Push as Name
from ps.table.spec import describe_difference, make_table

NEW, REPEATED, TOO_OLD, EARLIER_EPOCH = range(4)
_RENEWALS = 3
R = TypeVar("R")
_log = logging.getLogger("heterps.ps")


class ConflictError(RuntimeError):
    """A request that does not go with the state it meets."""


class OutdatedError(RuntimeError):
    """A push so late that whether it was applied is no longer known; it was not applied now."""


class StaleRouteError(RuntimeError):
    """A request by a routing that no longer holds."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table and what was asked of it."""

    spec: pb.TableSpec
    native: _native.Table
    # Cuts that saves have made of just these rows: a delta can begin at one of them.
    cuts: set[int] = field(default_factory=set, compare=False)

    @property
    def journaled(self) -> bool:
        """Whether its pushes go to the journal before they are acknowledged."""
        return self.spec.durability in ("log", "replica")

    @property
    def journal(self) -> str:
        """The journal that must know of it: by the durability that it gives."""
        return "log" if self.spec.durability == "checkpoint" else self.spec.durability


class ShardState:
    """The tables of one shard, and which pushes they have had.

    Whatever changes rows goes through the gate; `time_s` and the message alone determine what a
    change does, so that a log or a replica that repeats them ends in the same state.
    """

    def __init__(self, directory: str = "") -> None:
        self.directory = directory
        self.tables: dict[str, Table] = {}
        self.window = _native.Window()
        self.positions: dict[str, pb.Position] = {}
        self.ends: dict[str, tuple[int, int]] = {}  # client -> epoch, end of its newest push
        self.gate = Gate()
        self.run = uuid4().hex
        self.routing = pb.RouteRequest()  # as it was installed, if it was
        self.follows = False  # another shard, whose changes alone it makes
        self.journals: dict[str, Journal] = {}  # by the durability they give
        self.lock = threading.Lock()  # the dictionaries; held briefly
        # One save, fold, shrink or move at a time. Whoever needs both closes this one first.
        self.files = Gate()
        self._marking = threading.Lock()
        self._applying: dict[Name, threading.Event] = {}

    @property
    def route_version(self) -> int:
        """Of the routing installed; 0 is the even one over the shards as they were started."""
        return self.routing.install.version

    def owned(self, shard: int, shards: int) -> NDArray[np.uint8]:
        """Flags of the buckets that are this shard's: uint8 [1024].

        Args:
            shard: which one it is where no routing was installed.
            shards: of how many.
        """
        if self.routing.install.version:
            return buckets_of(route_of(self.routing.install), self.routing.index)
        return buckets_of(default_route(shards), shard)

    def find(self, name: str, dim: int) -> Table:
        """The table of that name and dim.

        Raises:
            KeyError: there is none of that name.
            TableError: it has another dim.
        """
        table = self.tables.get(name)
        if table is None:
            known = sorted(self.tables)
            raise KeyError(
                f"table {name[:140]!r} does not exist here; the shard has "
                f"{', '.join(known) or 'no tables'}{did_you_mean(name[:140], known)}"
            )
        if dim and table.spec.dim != dim:
            raise TableError(f"table {name!r} has dim {table.spec.dim}; the request says {dim}")
        return table

    def create(self, spec: pb.TableSpec, *, journal: bool = True) -> bool:
        """Make a table; whether it was new.

        Raises:
            ConflictError: it is there with another spec.
            TableError: a spec that cannot be.
        """
        return self._abreast(lambda: self._create(spec, journal))

    def _create(self, spec: pb.TableSpec, journal: bool) -> bool:
        with self.gate.passing(), self.lock:
            have = self.tables.get(spec.name)
            if have is not None:
                if have.spec != spec:
                    raise ConflictError(
                        f"table {spec.name!r} exists with another spec: "
                        f"{describe_difference(have.spec, spec)}"
                    )
                return False
            table = Table(spec, make_table(spec, self.directory))
            if journal and table.journal and table.journal not in self.journals:
                flag = "--replica" if table.journal == "replica" else "--data"
                raise TableError(
                    f"table {spec.name!r}: durability={spec.durability}; expected a shard that "
                    f"was started with {flag}"
                )
            if journal and table.journal:
                self._journal("create", spec.SerializeToString(), only=table.journal)
            self.tables[spec.name] = table
        _log.info("table %s: dim %d", spec.name, spec.dim)
        return True

    def drop(self, prefix: str, *, journal: bool = True) -> list[str]:
        """Forget tables; the names of those that were there."""
        return self._abreast(lambda: self._drop(prefix, journal))

    def _drop(self, prefix: str, journal: bool) -> list[str]:
        with self.gate.passing(), self.lock:
            names = [name for name in self.tables if name.startswith(prefix)]
            if names and journal:
                self._journal("drop", prefix.encode())
            for name in names:
                del self.tables[name]
        return names

    def push(self, table: Table, push: Push, time_s: int, *, journal: bool = True) -> bool:
        """Apply a push unless it has been; whether it was applied now.

        Raises:
            OutdatedError, ConflictError: it cannot be told, or its client has begun anew.
        """
        return self._abreast(lambda: self._push(table, push, time_s, journal))

    def _push(self, table: Table, push: Push, time_s: int, journal: bool) -> bool:
        head = push.head
        who = (head.client, head.epoch, head.sequence)
        while True:
            with self.gate.passing(who):
                verdict, first = self._mark(who, stale=journal and head.route != self.route_version)
                if verdict == NEW:
                    if first is None:
                        self.check_route(head.route)
                    self._apply(table, push, time_s, journal)
                    return True
            if verdict != REPEATED:
                break
            if first is None:
                return False
            first.wait()  # it may fail, so look again
        text = f"client {head.client!r} epoch {head.epoch} sequence {head.sequence}"
        if verdict == TOO_OLD:
            raise OutdatedError(
                f"Push of {text}: more than {_native.WINDOW} pushes behind its newest, so whether "
                "it was applied is no longer known; it was not applied now"
            )
        raise ConflictError(
            f"Push of {text}: a later epoch of this client has pushed since; two clients must not "
            "share a client_id"
        )

    def shrink(self, request: pb.ShrinkRequest, *, journal: bool = True) -> int:
        """Apply a table's eviction rules; the number of keys removed."""
        return self._abreast(lambda: self._shrink(request, journal))

    def _shrink(self, request: pb.ShrinkRequest, journal: bool) -> int:
        table = self.find(request.table, 0)
        with self.files.closed(), self.gate.closed():
            if journal and table.journaled:
                self._journal("shrink", request.SerializeToString(), only=table.spec.durability)
            return table.native.shrink(
                time_s=request.time_s & 0xFFFFFFFF,
                step=request.step & 0xFFFFFFFF,
                decay=request.decay,
            )

    def check_route(self, version: int) -> None:
        """Refuse a request that goes by another routing.

        Raises:
            StaleRouteError: the sender should ask for the present one.
        """
        if version != self.route_version:
            raise StaleRouteError(
                f"the request goes by routing {version}; this shard has {self.route_version}"
            )

    def absorb(self, block: pb.StateBlock, *, journal: bool = True) -> int:
        """Take rows, or what has been applied, from another shard; the number of rows."""
        return self._abreast(lambda: self._absorb(block, journal))

    def _absorb(self, block: pb.StateBlock, journal: bool) -> int:
        if block.HasField("table"):
            spec = pb.TableSpec()
            spec.CopyFrom(block.table)
            self._create(spec, journal)
            return 0
        with self.gate.passing():
            table = self.tables.get(block.name)
            only = table.journal if table is not None else ""
            if journal and (only or not block.name):
                self._journal("absorb", block.SerializeToString(), only=only)
            if block.erase:
                flags = np.zeros(_native.BUCKETS, np.uint8)
                flags[list(block.erase)] = 1
                for other in list(self.tables.values()):
                    other.native.erase(flags)
            self.window.merge([(w.client, w.epoch, w.highest, w.bits) for w in block.window])
            self.note_ends(block.window)
            return table.native.absorb(block.payload, None) if table is not None else 0

    def install(self, request: pb.RouteRequest, *, journal: bool = True) -> None:
        """Go by another routing, and forget the rows that it takes away.

        Unless nothing is journaled, the caller has closed the gate and has its turn at the files.
        """
        for _ in range(_RENEWALS if journal else 0):
            try:
                self._journal("route", request.SerializeToString())
                break
            except BehindError:
                for each in list(self.journals.values()):
                    each.renew(closed=True, behind=True)
        self.routing.CopyFrom(request)
        others = np.ascontiguousarray(self.owned(0, 1) == 0, np.uint8)
        for table in list(self.tables.values()):
            table.native.erase(others)
            table.cuts.clear()  # removals that leave no trace

    def summary(self) -> pb.StateBlock:
        """What a log or a replica must know besides tables; with `take_over` it is brought back."""
        with self.lock:
            ends = dict(self.ends)
            block = pb.StateBlock(positions=list(self.positions.values()))
        block.window.extend(
            pb.ClientWindow(client=c, epoch=epoch, end=end) for c, (epoch, end) in ends.items()
        )
        if self.route_version:
            block.routing.CopyFrom(self.routing)
        return block

    def take_over(self, block: pb.StateBlock) -> None:
        """See `summary`."""
        self.take_positions(block.positions)
        self.note_ends(block.window)
        if block.HasField("routing"):
            self.routing.CopyFrom(block.routing)

    def note_ends(self, windows: Iterable[pb.ClientWindow]) -> None:
        """Where the newest pushes of clients end, as another shard, or an earlier run, knew it."""
        with self.lock:
            for window in windows:
                if window.end:
                    end = (window.epoch, window.end)
                    self.ends[window.client] = max(self.ends.get(window.client, (0, 0)), end)

    def renew_journals(self) -> None:
        """Have journals take the whole state, after a change that they were not told of."""
        for journal in list(self.journals.values()):
            journal.renew()

    def replay(self, record: pb.LogRecord, payload: memoryview) -> None:
        """Repeat a change that a journal has kept."""
        if record.kind == "push":
            head, body = unpack(pb.PushRequest, bytes(payload))
            if head.table in self.tables:
                table = self.find(head.table, head.dim)
                self.push(table, take_apart(head, body, payload), record.time_s, journal=False)
        elif record.kind == "create":
            self.create(pb.TableSpec.FromString(bytes(payload)), journal=False)
        elif record.kind == "drop":
            self.drop(bytes(payload).decode(), journal=False)
        elif record.kind == "shrink":
            self.shrink(pb.ShrinkRequest.FromString(bytes(payload)), journal=False)
        elif record.kind == "absorb":
            self.absorb(pb.StateBlock.FromString(bytes(payload)), journal=False)
        elif record.kind == "route":
            self.install(pb.RouteRequest.FromString(bytes(payload)), journal=False)
        elif record.kind == "state":
            self.take_over(pb.StateBlock.FromString(bytes(payload)))
        else:
            raise ValueError(f"a log record of kind {record.kind!r}")

    def note_position(self, head: pb.PushRequest) -> None:
        """Remember where a client's reader was, and where its newest push ends."""
        with self.lock:
            end = (head.epoch, (head.first or head.sequence) + max(1, head.parts) - 1)
            self.ends[head.client] = max(self.ends.get(head.client, (0, 0)), end)
            if head.position:
                known = self.positions.get(head.client)
                at = (head.epoch, head.sequence)
                if known is None or (known.epoch, known.sequence) < at:
                    self.positions[head.client] = pb.Position(
                        client=head.client,
                        epoch=head.epoch,
                        sequence=head.sequence,
                        position=head.position,
                    )

    def take_positions(self, positions: Iterable[pb.Position]) -> None:
        """Positions from a checkpoint."""
        with self.lock:
            for position in positions:
                self.positions[position.client] = pb.Position.FromString(
                    position.SerializeToString()
                )

    def _abreast(self, change: Callable[[], R]) -> R:
        """Make a change; a journal that lacks what was before is filled first."""
        for _ in range(_RENEWALS):
            try:
                return change()
            except BehindError:
                for journal in list(self.journals.values()):
                    journal.renew(behind=True)
        return change()

    def _mark(self, who: Name, *, stale: bool) -> tuple[int, threading.Event | None]:
        """Whether a push is new here, and what tells that it has been applied or has failed.

        One that goes by another routing may have been applied before the routing changed; if it
        was not, it is not marked.
        """
        with self._marking:
            verdict = self.window.mark(*who)
            if verdict == NEW:
                if stale:
                    self.window.unmark(*who)
                    return verdict, None
                self._applying[who] = threading.Event()
            return verdict, self._applying.get(who)

    def _apply(self, table: Table, push: Push, time_s: int, journal: bool) -> None:
        head = push.head
        who = (head.client, head.epoch, head.sequence)
        applied = False
        try:
            if journal and table.journaled:
                self._journal("push", push.message, time_s, only=table.spec.durability)
            table.native.push(
                push.keys,
                head.key_bytes or 8,
                push.values,
                kind=head.kind,
                rate=head.rate if head.HasField("rate") else 1.0,
                nonce=crc32(head.client.encode()) << 32 ^ head.sequence & 0xFFFFFFFF,
                time_s=time_s & 0xFFFFFFFF,
                step=head.step & 0xFFFFFFFF,
                usage=push.usage,
                distinct=head.distinct,
            )
            applied = True
            self.note_position(head)
        finally:
            with self._marking:
                if not applied:
                    self.window.unmark(*who)
                self._applying.pop(who).set()

    def _journal(
        self, kind: str, payload: Buffer, time_s: int | None = None, only: str = ""
    ) -> None:
        for durability, journal in self.journals.items():
            if not only or durability == only:
                journal.append(kind, now_s() if time_s is None else time_s, payload)


def now_s() -> int:
    """Unix time in whole seconds."""
    return int(time.time())
