"""A shard's state, and the one way to change it."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar
from uuid import uuid4
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from chassis.near import did_you_mean
from protos import parameter_server_pb2 as pb
from ps.engine import _native
from ps.errors import ConflictError, OutdatedError, StaleRouteError, TableError
from ps.shard.ending import end_process
from ps.shard.exactly_once import LATE_S, ExactlyOnce, Seen
from ps.shard.journal import BehindError, Buffer, Journal, Place, nowhere
from ps.shard.push import ReceivedPush
from ps.shard.stage import Part, Steps, durabilities_of, part_of
from ps.table.applied import Applied, AppliedWindow
from ps.table.buckets import Share, as_flags, buckets_of, route_of, version_of
from ps.table.gate import Gate
from ps.table.series import Flags, SeriesProgress
from ps.table.spec import describe_difference
from ps.table.table import Table, without_share

_RENEWALS = 3
_ALONE = Share(0, 1)
P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("heterps.ps")


def filling_journals(
    change: Callable[Concatenate["ShardState", P], R],
) -> Callable[Concatenate["ShardState", P], R]:
    """A change of a shard's state; a journal that lacks what was before it is filled first."""

    @wraps(change)
    def attempt(state: "ShardState", /, *args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(_RENEWALS):
            try:
                return change(state, *args, **kwargs)
            except BehindError:
                for journal in list(state.journals.values()):
                    journal.renew(behind=True)
        return change(state, *args, **kwargs)

    return attempt


class ShardState:
    """The tables of one shard, and which pushes they have had.

    Whatever changes rows goes through the gate; `time_s` and the message alone determine what a
    change does, and rows see changes in the order in which a journal has them, so that a log or a
    replica that repeats them ends in the same state.
    """

    def __init__(self, directory: str = "") -> None:
        self.directory = directory
        self.tables: dict[str, Table] = {}
        self.pushes = ExactlyOnce()
        self.steps = Steps()
        self.gate = Gate()
        self.run = uuid4().hex
        self.routing = pb.RouteRequest()  # as it was installed, if it was
        self.buckets: Flags = np.ones(_native.BUCKETS, bool)  # its own; all, where none was
        self.follows = False  # another shard, whose changes alone it makes
        self.journals: dict[str, Journal] = {}  # by the durability they give
        # Raises NoRoomError where a journal could not take these tables beside its others.
        self.require_room: Callable[[Mapping[str, Table]], None] = lambda tables: None
        self.lock = threading.Lock()  # the dictionaries; held briefly
        # One save, fold, shrink or move at a time. Whoever needs both closes this one first.
        self.files = Gate()

    @property
    def route_version(self) -> int:
        """Of the routing installed; 0 is the even one over the shards as they were started."""
        return self.routing.install.version

    def owned(self, share: Share = _ALONE) -> NDArray[np.uint8]:
        """Flags of the buckets that are this shard's: uint8 [1024].

        Args:
            share: what it has where no routing was installed.
        """
        if self.routing.install.version:
            return buckets_of(route_of(self.routing.install), self.routing.index)
        return share.buckets()

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

    @filling_journals
    def create(self, spec: pb.TableSpec, *, journal: bool = True) -> bool:
        """Make a table; whether it was new.

        Raises:
            ConflictError: it is there with another spec, or another share.
            TableError: a spec that cannot be.
        """
        with self.gate.passing(), self.lock:
            have = self.tables.get(spec.name)
            if have is not None:
                plain = without_share(spec)
                if have.spec != plain:
                    raise ConflictError(
                        f"table {spec.name!r} exists with another spec: "
                        f"{describe_difference(have.spec, plain)}"
                    )
                if not journal and spec.share:  # the base lacks it
                    self.tables[spec.name] = replace(have, share=Share.of(spec.share))
                elif not self.route_version:
                    have.check_share(spec.share)
                return False
            table = Table.make(spec, self.directory)
            if journal and table.journal and table.journal not in self.journals:
                flag = "--replica" if table.journal == "replica" else "--data"
                raise TableError(
                    f"table {spec.name!r}: durability={spec.durability}; expected a shard that "
                    f"was started with {flag}"
                )
            if journal and table.journal:
                self._journal("create", table.told.SerializeToString(), only=table.journal)
            self.tables[spec.name] = table
        _log.info("table %s: dim %d", spec.name, spec.dim)
        return True

    @filling_journals
    def drop(self, prefix: str, *, journal: bool = True) -> list[str]:
        """Forget tables; the names of those that were there."""
        with self.gate.passing(), self.lock:
            names = [name for name in self.tables if name.startswith(prefix)]
            if journal:
                self._journal("drop", prefix.encode())
            self.steps.drop(prefix)
            for name in names:
                del self.tables[name]
        return names

    @filling_journals
    def push(self, push: ReceivedPush, time_s: int, *, journal: bool = True) -> bool:
        """Apply a push unless it has been; whether it was applied now.

        Raises:
            TableError, KeyError: its table is not here, or has another dim.
            OutdatedError, ConflictError: it cannot be told, or its client has begun anew.
        """
        if not journal:  # whoever made the change had forgotten its client by then
            self.pushes.forget(time_s, push.id.client)
        while True:
            with self.gate.passing(push.id):
                table = self.find(push.head.table, push.head.dim)  # a load may have replaced it
                # By another routing it may have been applied before the routing changed.
                stale = journal and version_of(push.head.route) != self.route_version
                if journal and not stale:
                    table.check_share(push.head.route)
                # Its client may have been forgotten since it was applied.
                made_s = push.head.made_s or time_s
                late = journal and self.pushes.may_be_forgotten(push.id, made_s, time_s)
                first = not (stale or late)
                seen = self.pushes.begin(push.id) if first else self.pushes.look(push.id)
                if seen is Seen.NEW:
                    if stale:
                        self.check_route(push.head.route)
                    if late:
                        raise OutdatedError(
                            f"Push of client {push.id.client!r}: made {time_s - made_s} s ago by "
                            f"the clocks of both hosts; expected at most {LATE_S} s between them, "
                            "or fewer where more clients push than are remembered. "
                            "Whether it was applied is not known; it was not applied now"
                        )
                    self._apply(table, push, time_s, journal)
                    return True
            if seen is Seen.APPLIED:
                return False
            self.pushes.wait(push.id)  # it may fail, so look again

    @filling_journals
    def shrink(self, request: pb.ShrinkRequest, *, journal: bool = True) -> int:
        """Apply a table's eviction rules; the number of keys removed."""
        with self.files.closed(), self.gate.closed():
            table = self.find(request.table, 0)
            if journal and table.journaled:
                self._journal("shrink", request.SerializeToString(), only=table.spec.durability)
            return table.native.shrink(
                time_s=request.time_s & 0xFFFFFFFF,
                step=request.step & 0xFFFFFFFF,
                decay=request.decay,
            )

    def check_route(self, route: int) -> None:
        """Refuse a request that goes by another routing.

        Args:
            route: as the request says it; what it says of a share is a table's to check.

        Raises:
            StaleRouteError: the sender should ask for the present one.
        """
        version = version_of(route)
        if version != self.route_version:
            raise StaleRouteError(
                f"the request goes by routing {version}; this shard has {self.route_version}"
            )

    @filling_journals
    def absorb(self, block: pb.StateBlock, *, journal: bool = True) -> int:
        """Take rows, or what has been applied, from another shard; the number of rows."""
        if block.HasField("table"):
            self.create(without_share(block.table), journal=journal)
            return 0
        with self.gate.passing():
            table = self.tables.get(block.name)
            only = table.journal if table is not None else ""
            if journal and (only or not block.name):
                self._journal("absorb", block.SerializeToString(), only=only)
            if block.moved:
                moved = as_flags(list(block.moved)).astype(bool)
                self.steps.let_go(moved)
                self.steps.take_progress(map(SeriesProgress.of, block.series), moved)
            if block.staged:
                self.steps.take(part_of(block.payload))
                return 0
            if block.erase:
                flags = np.zeros(_native.BUCKETS, np.uint8)
                flags[list(block.erase)] = 1
                for other in list(self.tables.values()):
                    other.native.erase(flags)
            self.pushes.merge(map(AppliedWindow.of, block.window))
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
        owned = self.owned()
        self.buckets = owned.astype(bool)
        self.steps.let_go(~self.buckets)
        others = np.ascontiguousarray(owned == 0, np.uint8)
        for table in list(self.tables.values()):
            table.native.erase(others)
            table.cuts.clear()  # removals that leave no trace

    def summary(self, *, windows: bool) -> pb.StateBlock:
        """What a log or a replica must know besides tables; with `take_over` it is brought back.

        Args:
            windows: with all that has been applied; else where the newest pushes end.
        """
        told = self.pushes.windows() if windows else self.pushes.ends()
        block = pb.StateBlock(
            positions=self.pushes.positions(),
            window=[window.message for window in told],
            series=[progress.message for progress in self.steps.progress()],
            forgotten_s=self.pushes.forgotten_s,
        )
        if self.route_version:
            block.routing.CopyFrom(self.routing)
        return block

    def take_over(self, block: pb.StateBlock) -> None:
        """See `summary`."""
        self.pushes.merge(map(AppliedWindow.of, block.window))
        self.pushes.take_positions(block.positions)
        self.pushes.take_forgotten(block.forgotten_s)
        self.steps.merge(map(SeriesProgress.of, block.series))
        if block.HasField("routing"):
            self.routing.CopyFrom(block.routing)
            self.buckets = self.owned().astype(bool)

    def applied(self) -> Applied:
        """What has been applied; no push or commit may be in flight."""
        return Applied(self.pushes.windows(), self.steps.progress())

    def take_parts(self, messages: Iterable[bytes]) -> None:
        """Parts from a replica, or for one."""
        for message in messages:
            self.steps.put(part_of(message, self.buckets))

    def staged_for(self, durability: str) -> list[Part]:
        """The parts that a journal must know of."""
        kept_as = self._durabilities()
        return [
            part
            for part in self.steps.parts()
            if durability in (durabilities_of([part], kept_as) or {durability})
        ]

    def check_journals(self) -> None:
        """See that journals can take what they are to be told.

        Raises:
            TimeoutError: a replica does not answer.
        """
        for journal in list(self.journals.values()):
            journal.check()

    def renew_journals(self) -> None:
        """Have journals take the whole state, after a change that they were not told of."""
        for journal in list(self.journals.values()):
            journal.renew()

    def journal_step(
        self,
        kind: str,
        message: Buffer,
        parts: Iterable[Part],
        time_s: int | None = None,
        place: Callable[[str], None] = lambda durability: None,
        others: Iterable[str] = (),
    ) -> None:
        """Tell the journals that keep one of the tables; of a step without any, all.

        Args:
            place: called with each durability as its journal has taken the message, see `Place`.
            others: names of tables that it concerns besides.
        """
        if not self.journals:
            return
        concerned = durabilities_of(parts, self._durabilities(), others)
        told: list[Journal] = []
        try:
            for durability, journal in list(self.journals.items()):
                if concerned is None or durability in concerned:
                    self._journal(kind, message, time_s, durability, partial(place, durability))
                    told.append(journal)
        except BaseException:
            for journal in told:
                journal.fall_behind()
            raise

    def _apply(self, table: Table, push: ReceivedPush, time_s: int, journal: bool) -> None:
        head, turn = push.head, 0

        def place() -> None:
            nonlocal turn
            turn = table.native.take_turn()

        try:
            if journal and table.journaled:
                table.native.check_room()
                self._journal("push", push.message, time_s, table.spec.durability, place)
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
                turn=turn,
            )
        except BaseException as error:
            if turn or isinstance(error, _native.BrokenError):
                end_process(
                    "a push to table %r began and cannot be finished: %r", head.table, error
                )
            self.pushes.abort(push.id)
            raise
        self.pushes.commit(push.id, push.end, head.position, time_s)

    def _durabilities(self) -> dict[str, str]:
        return {name: table.spec.durability for name, table in list(self.tables.items())}

    def _journal(
        self,
        kind: str,
        payload: Buffer,
        time_s: int | None = None,
        only: str = "",
        place: Place = nowhere,
    ) -> None:
        for durability, journal in self.journals.items():
            if not only or durability == only:
                journal.append(kind, now_s() if time_s is None else time_s, payload, place)


def now_s() -> int:
    """Unix time in whole seconds."""
    return int(time.time())
