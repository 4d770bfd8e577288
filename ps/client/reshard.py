"""Another number of shards, while training goes on: who moves what, and in which order."""

import time
from uuid import uuid4

import grpc
import numpy as np

from protos import parameter_server_pb2 as pb
from ps.client.session import Session, Shard
from ps.client.shares import check_shares
from ps.engine import _native
from ps.errors import ShardError
from ps.table.buckets import Route, route_of, routing_of, spread

_ROUNDS = 4  # of sending what has changed, before pushes are held back for the last
_FEW_ROWS = 10_000
_HOLD_S = 10.0
_ATTEMPTS = 3  # at a last round, when a shard could not hold pushes back for so long
Moves = dict[tuple[str, str], list[int]]  # from, to -> buckets


def reshard(session: Session, addresses: list[str], timeout_s: float) -> int:
    """Move buckets so that `addresses` share them evenly; the number of rows moved.

    Until the first shard has the new routing nothing has changed. An attempt that ends later is
    finished by the next one, whatever that is for.

    Raises:
        ValueError: addresses that are no list of host:port, each once.
        TableError: a table was made with other shards.
        ShardError: a shard failed.
    """
    if len(set(addresses)) != len(addresses) or not 1 <= len(addresses) <= _native.BUCKETS:
        raise ValueError(f"addresses={addresses}; expected 1 to {_native.BUCKETS}, each once")
    limit = time.monotonic() + timeout_s
    session.update_routes()
    if session.routes.version == 0:
        # So that every shard knows which buckets are its own. Nothing moves.
        old = session.routes
        shards = session.shards_of(old)
        replies = [s.call(s.stub.Stats, pb.StatsRequest(), "Stats") for s in shards]
        check_shares(old.addresses, replies)  # before the first of them goes by a wrong routing
        _install(session, routing_of(list(old.addresses), old.route, 1), list(old.addresses), limit)
        session.update_routes()
    _finish_interrupted(session, addresses, limit)
    old = session.routes
    present = list(old.addresses)
    target = _target(present, old.route, addresses)
    if present == addresses and np.array_equal(target, old.route):
        return 0
    return _change(session, routing_of(addresses, target, old.version + 1), present, limit)


def _finish_interrupted(session: Session, more: list[str], limit: float) -> None:
    """Finish a change that was begun, so that all shards have the same routing."""
    newest = session.routes
    present = list(newest.addresses)
    before: set[str] = set()
    for shard in session.connect(present):
        before.update(_routing(shard).shards)
    everybody = list(dict.fromkeys([*present, *before, *more]))
    behind = [s for s in session.connect(everybody) if _routing(s).version < newest.version]
    if any(s.address in present or _routing(s).version for s in behind):
        _change(session, routing_of(present, newest.route, newest.version), everybody, limit)


def _routing(shard: Shard) -> pb.Routing:
    reply: pb.RouteReply = shard.call(shard.stub.Route, pb.RouteRequest(), "Route")
    return reply.routing


def _change(session: Session, routing: pb.Routing, present: list[str], limit: float) -> int:
    """Have all shards go by a new routing; rows that it takes away from one are sent first."""
    addresses = list(routing.shards)
    everybody = list(dict.fromkeys([*present, *addresses]))
    shards = {s.address: s for s in session.connect(everybody)}
    moves: Moves = {}
    for address, shard in shards.items():
        moves |= _moves(address, _routing(shard), routing)
    token, rows = uuid4().hex, 0
    for again in range(_ROUNDS):
        sent = 0
        for (a, b), buckets in moves.items():
            sent += _move(shards[a], b, buckets, token, routing.version, limit, again=again > 0)
        rows += sent
        if sent < _FEW_ROWS and again:
            break
    # Who sends lets go first: those who receive take nothing until all rows are theirs.
    for sender in dict.fromkeys(a for a, _ in moves):
        mine = {pair: buckets for pair, buckets in moves.items() if pair[0] == sender}
        for attempt in range(_ATTEMPTS):
            for (a, b), buckets in mine.items():
                rows += _move(
                    shards[a], b, buckets, token, routing.version, limit, again=True, last=True
                )
            try:
                _install(session, routing, [sender], limit)
                break
            except ShardError as error:
                held = error.code is grpc.StatusCode.FAILED_PRECONDITION
                if not held or attempt + 1 == _ATTEMPTS:
                    raise
    _install(session, routing, everybody, limit)
    session.update_routes()
    return rows


def _install(session: Session, routing: pb.Routing, where: list[str], limit: float) -> None:
    """Tell shards; one that does not answer is tried until then."""
    addresses = list(routing.shards)
    for shard in session.connect(where):
        own = shard.address
        index = addresses.index(own) if own in addresses else len(addresses)
        request = pb.RouteRequest(install=routing, index=index)
        while True:
            try:
                shard.call(shard.stub.Route, request, "Route")
                break
            except ShardError as error:
                silent = error.code in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                )
                if not silent or time.monotonic() > limit:
                    raise
                time.sleep(0.1)


def _target(old: list[str], route: Route, new: list[str]) -> Route:
    """The present route by the new numbers of the shards, evened out."""
    number = {address: i for i, address in enumerate(new)}
    present = np.array([number.get(old[int(s)], len(new)) for s in route], np.uint16)
    return spread(present, len(new))


def _moves(address: str, present: pb.Routing, routing: pb.Routing) -> Moves:
    """What a shard must send, going by the routing that it has now."""
    if present.version in (0, routing.version):
        return {}  # nothing has been given to it, or it has let go already
    was, will_be = route_of(present), route_of(routing)
    moves: Moves = {}
    for bucket in range(_native.BUCKETS):
        a, b = present.shards[was[bucket]], routing.shards[will_be[bucket]]
        if a == address and b != address:
            moves.setdefault((a, b), []).append(bucket)
    return moves


def _move(
    shard: Shard,
    to: str,
    buckets: list[int],
    token: str,
    route: int,
    limit: float,
    *,
    again: bool,
    last: bool = False,
) -> int:
    request = pb.MoveRequest(
        to=to,
        buckets=buckets,
        token=token,
        again=again,
        last=last,
        hold_s=_HOLD_S,
        route=route,
    )
    left = max(1.0, limit - time.monotonic())
    reply: pb.MoveReply = shard.call(
        shard.stub.Move, request, f"Move of {len(buckets)} buckets to {to}", left
    )
    return reply.rows
