"""Buckets that move to other shards while training goes on.

The shard that has them sends their rows, then, again, those that changed meanwhile. For the last
round it holds pushes back until it has the new routing; from then on it refuses requests that go
by the old one, and their senders split them anew. A shard never lets go of rows that it has not
sent, and those who receive take requests only once every sender has let go.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chassis.channels import RpcError, call, connect
from protos import parameter_server_pb2 as pb
from protos.parameter_server_pb2_grpc import ParameterServerStub
from ps.engine import _native
from ps.errors import ConflictError, StaleRouteError, TableError
from ps.shard import transfer
from ps.shard.stage import Part
from ps.shard.state import ShardState
from ps.table.buckets import as_flags, route_of
from ps.table.series import Flags
from ps.table.table import Table

_TURN_S = 60.0
_log = logging.getLogger("heterps.ps")


@dataclass(frozen=True, slots=True)
class _TableCut:
    """When the rows of a table were sent: cuts are the table's own."""

    table: _native.Table
    cut: int


@dataclass(slots=True)
class _Sent:
    """What was sent under one token."""

    token: str
    cuts: dict[str, dict[str, _TableCut]] = field(default_factory=dict)  # to -> table
    last: dict[int, str] = field(default_factory=dict)  # bucket -> to, under the hold
    route: int = 0

    def since(self, to: str, tables: Mapping[str, Table]) -> dict[str, int]:
        """The cut of each table after which changes are wanted; none where all rows are.

        A load, say, has put another table in the place of one whose rows were sent.
        """
        sent = self.cuts.get(to, {})
        for name, each in sent.items():
            if name not in tables or tables[name].native is not each.table:
                return {}
        return {name: each.cut for name, each in sent.items()}


class Mover:
    """One shard's part in a change of the routing."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._sending = _Sent("")
        self._receiving: set[tuple[str, str]] = set()  # token, run of the sender

    def route(self, request: pb.RouteRequest) -> pb.RouteReply:
        """Tell the routing, or install a newer one and forget what it takes away."""
        if request.HasField("install"):
            self._install(request)
        return pb.RouteReply(routing=self._state.routing.install)

    def move(self, request: pb.MoveRequest) -> pb.MoveReply:
        """Send the rows of some buckets, or those changed since the last time."""
        if not request.token or not request.buckets or max(request.buckets) >= _native.BUCKETS:
            raise TableError(
                f"Move: token {request.token!r}, {len(request.buckets)} buckets; expected a name "
                f"and numbers below {_native.BUCKETS}"
            )
        state, token = self._state, request.token
        hold = min(max(request.hold_s, 0.1), 60.0)
        state.files.close(token, float("inf"), timeout_s=_TURN_S)
        keep = False
        try:
            rows = self._move(request, hold)
            keep = request.last
        finally:
            if keep:
                state.files.close(token, hold)
            else:
                state.gate.open(token)
                state.files.open(token)
        return pb.MoveReply(rows=rows)

    def _move(self, request: pb.MoveRequest, hold: float) -> int:
        state, token = self._state, request.token
        held = state.gate.held_by(token)
        state.gate.close(token, float("inf"), timeout_s=_TURN_S)
        if request.route <= state.route_version:
            raise StaleRouteError(f"Move for routing {request.route}; it is installed already")
        sending = self._sending
        if not request.again and sending.token != token:
            # Whoever moved buckets before must not go on: what it has sent may be gone.
            sending = self._sending = _Sent(token, route=request.route)
        if sending.token != token or (request.again and request.to not in sending.cuts):
            raise ConflictError(
                f"Move: nothing was sent to {request.to} as {token[:64]!r}, or another change of "
                "the routing has begun since; expected the first round again"
            )
        if not (held and request.last):
            sending.last.clear()  # pushes have passed since
        flags = as_flags(list(request.buckets))
        with state.lock:
            tables = dict(state.tables)
        since = sending.since(request.to, tables) if request.again else {}
        try:
            snapshots = _snapshots(tables, since, flags)
        except _native.ForgottenError:  # more rows have gone since than can be named
            since, snapshots = {}, _snapshots(tables, {}, flags)
        try:
            cuts = {n: _TableCut(tables[n].native, each.cut) for n, each in snapshots.items()}
            head = pb.StateBlock()
            parts: list[Part] = []
            if request.last:
                head, parts = self._steps_of(request, flags.astype(bool))
            else:
                state.gate.open(token)
            head.erase.extend([] if since else request.buckets)
            rows = self._send(request, tables, snapshots, head, parts)
        finally:
            for snapshot in snapshots.values():
                snapshot.close()
        sending.cuts[request.to] = cuts
        if request.last:
            sending.last.update(dict.fromkeys(request.buckets, request.to))
            state.gate.close(token, hold)
        return rows

    def _steps_of(self, request: pb.MoveRequest, flags: Flags) -> tuple[pb.StateBlock, list[Part]]:
        """What goes along with the last rows: what has been applied, and parts of steps."""
        applied = self._state.applied()
        head = pb.StateBlock(
            window=[window.message for window in applied.windows],
            series=[progress.message for progress in applied.series],
            moved=request.buckets,
        )
        return head, [part.only(flags) for part in self._state.steps.parts()]

    def absorb(self, first: pb.StateBlock, rest: Iterator[pb.StateBlock]) -> int:
        """Take rows of buckets that are on their way here; the number of rows."""
        state, rows = self._state, 0
        if first.route <= state.route_version:
            raise ConflictError(f"Absorb for routing {first.route}; it is installed already")
        key = (first.token, first.of)
        if first.erase:
            state.absorb(pb.StateBlock(erase=first.erase))
            self._receiving.add(key)
        elif key not in self._receiving:
            raise ConflictError(
                "Absorb: this shard was started since the first rows were sent; expected all"
            )
        if first.moved:
            state.absorb(pb.StateBlock(moved=first.moved, series=first.series))
        for block in rest:
            rows += state.absorb(block)
        if first.last:
            state.absorb(pb.StateBlock(window=first.window))
        return rows

    def _send(
        self,
        request: pb.MoveRequest,
        tables: dict[str, Table],
        snapshots: dict[str, _native.Snapshot],
        head: pb.StateBlock,
        parts: list[Part],
    ) -> int:
        def messages() -> Iterator[pb.StateBlock]:
            head.MergeFrom(
                pb.StateBlock(
                    token=request.token,
                    last=request.last,
                    of=self._state.run,
                    route=request.route,
                )
            )
            yield head
            yield from transfer.blocks_of(tables, snapshots, parts)

        with connect(request.to) as channel:
            try:
                reply: pb.AbsorbReply = call(
                    ParameterServerStub(channel).Absorb,
                    messages(),
                    what=f"buckets to {request.to}",
                    timeout_s=transfer.TIMEOUT_S,
                )
            except RpcError as error:
                raise ConflictError(f"Move: {error}; repeat the reshard") from None
        return reply.rows

    def _install(self, request: pb.RouteRequest) -> None:
        state, routing = self._state, request.install
        route = route_of(routing)
        if routing.version < state.route_version:
            raise ConflictError(
                f"Route: version {routing.version}; this shard has {state.route_version} already"
            )
        if routing.version == state.route_version:
            if routing != state.routing.install:
                raise ConflictError(
                    f"Route: this shard has another routing of version {routing.version}: two "
                    "reshards were made at once; repeat one of them"
                )
            return
        stays = route == request.index
        if not state.route_version:
            self._check_shares(stays)
        owned = state.owned() if state.route_version else np.zeros_like(stays, np.uint8)
        leaving = np.flatnonzero((owned != 0) & ~stays)
        if not len(leaving):
            with state.files.closed(_TURN_S), state.gate.closed():
                state.install(request)
        else:
            self._install_after_move(request, {int(b): routing.shards[route[b]] for b in leaving})
        self._sending = _Sent("")
        self._receiving.clear()
        _log.info(
            "routing %d: %d of %d buckets", routing.version, int(stays.sum()), _native.BUCKETS
        )

    def _check_shares(self, stays: Flags) -> None:
        """Refuse a first routing that does not leave every row where it is."""
        for name, table in list(self._state.tables.items()):
            if table.share is not None and not np.array_equal(table.share.buckets(), stays):
                raise ConflictError(
                    f"Route: table {name!r} has {table.share} here, and the routing gives this "
                    "shard other buckets; expected a reshard from the addresses that the table "
                    "was made or loaded with, all of them in their order"
                )

    def _install_after_move(self, request: pb.RouteRequest, leaving: dict[int, str]) -> None:
        """Install a routing that takes buckets away."""
        state, sending = self._state, self._sending
        token = sending.token
        sent = sending.route == request.install.version and all(
            sending.last.get(bucket) == to for bucket, to in leaving.items()
        )
        try:
            if not sent:
                raise TimeoutError("rows have not been sent")
            state.files.drain(token)
            state.gate.drain(token)
        except TimeoutError as error:
            raise ConflictError(
                f"Route: {error}; expected a last round of Move, and pushes held back since"
            ) from None
        try:
            state.install(request)
        finally:
            state.gate.open(token)
            state.files.open(token)


def _snapshots(
    tables: Mapping[str, Table], since: Mapping[str, int], buckets: NDArray[np.uint8]
) -> dict[str, _native.Snapshot]:
    """Snapshots of some buckets, or of what has changed there since the cut of each table.

    Raises:
        ForgottenError: a table cannot tell any more what has changed; there is no snapshot then.
    """
    made: dict[str, _native.Snapshot] = {}
    try:
        for name, table in tables.items():
            made[name] = table.native.snapshot(
                since=since.get(name, 0), values=False, min_score=0.0, buckets=buckets
            )
    except BaseException:
        for snapshot in made.values():
            snapshot.close()
        raise
    return made
