"""One pull: its messages to the shards, and the rows put together again."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import grpc
import numpy as np
from numpy.typing import NDArray

from protos.codec import ALIGNMENT
from ps.client.fetch import Fetched, Wanted, fetch
from ps.client.futures import combine
from ps.client.pull_in_place import PullInPlace
from ps.client.session import Routes, Session, Shard
from ps.engine import _native
from ps.errors import ShardError, StaleRouteError, TableError
from ps.table.arrays import FLOAT16_END, Floats, Keys

# Larger batches travel as several messages: gRPC is fastest with 1-16 MiB.
MESSAGE_BYTES = 8 << 20
_FEW = 0.05  # of a batch's keys, that repeat others
# Places of a sample in units of 2^-32 of a batch, one drawn in each of its parts: batches may have
# any period, and no key is to be looked at twice.
_SPREAD = (np.arange(4096) << 20).astype(np.uint64)
_SPREAD += np.random.default_rng(1).integers(0, 1 << 20, 4096, np.uint64)
Positions = NDArray[np.int64]
Part = tuple[Shard, Keys, Positions | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which keys of a batch are asked for.

    Attributes:
        routes: the routing that it was made by.
        keys: uint64 [U], distinct and by shard unless `begin` is None.
        begin: where each shard's keys begin, and the end; None: they are as the caller's are.
        inverse: for each key of the caller, which of `keys` it is; None: they are the same.
    """

    routes: Routes
    keys: Keys
    begin: list[int] | None
    inverse: Positions | None

    @classmethod
    def of(cls, session: Session, keys: Keys, distinct: bool) -> "Plan":
        """Of a caller's keys; they are taken as they are where hardly one can be there twice.

        Args:
            session: the connections.
            keys: uint64 [n].
            distinct: no key is there twice.
        """
        routes = session.routes
        if distinct or (len(routes.addresses) == 1 and _hardly_repeated(keys)):
            return cls(routes, keys, None, None)
        unique, begin, inverse = _native.plan(keys, routes.route, len(routes.addresses))
        return cls(routes, unique, begin, inverse)

    def parts(self, session: Session, row_bytes: int) -> list[Part]:
        """The messages; those without positions have the keys one after the other."""
        if self.begin is None and len(self.routes.addresses) > 1:
            return [*split(session, self.routes, self.keys, row_bytes)]
        begins = self.begin or [0, len(self.keys)]
        step = max(1, MESSAGE_BYTES // row_bytes)
        return [
            (shard, self.keys[at : min(at + step, end)], None)
            for shard, begin, end in zip(
                session.shards_of(self.routes), begins[:-1], begins[1:], strict=True
            )
            for at in range(begin, end, step)
        ]


def _hardly_repeated(keys: Keys) -> bool:
    """Whether to find the few keys that repeat others would cost more than it saves, by a sample.

    Of n keys of which a share r repeats another, s have r s² / n such pairs or more.
    """
    if len(keys) < 4 * len(_SPREAD):
        return False
    sample = keys[(_SPREAD * np.uint64(len(keys))) >> np.uint64(32)]
    pairs = len(sample) - len(_native.unique(sample)[0])
    return pairs <= _FEW * len(sample) ** 2 / len(keys)


class Pull:
    """Rows of a caller's keys: in place where all shards are on this host.

    Otherwise, of distinct keys, spread to where the caller's keys were.

    Args:
        session: the connections.
        table: its name.
        dim: floats a row.
        keys: uint64 [n].
        distinct: no key is there twice.
        shape: of the caller's keys.
        wire: how rows travel; in place as float32 alone.
        read_only: rows on disk stay there.
    """

    def __init__(
        self,
        session: Session,
        table: str,
        dim: int,
        keys: Keys,
        distinct: bool,
        shape: tuple[int, ...],
        wire: str,
        read_only: bool,
    ) -> None:
        self.wanted = Wanted(table, dim, keys, wire, read_only)
        self._session = session
        self._distinct = distinct
        self._shape = shape
        self._lent: list[Fetched] = []  # in shared memory, to be given back

    def run(self) -> Floats:
        """Make it on this thread and helpers."""
        begun = self._begin_in_place()
        rows = begun.finish() if begun else None
        if rows is not None:
            return self.shaped(rows[0])
        plan = self.plan()
        parts = plan.parts(self._session, self.wanted.row_bytes)
        works = [partial(self._fetch, plan.routes, shard, keys) for shard, keys, _ in parts]
        try:
            return self._finish(plan, parts, self._session.run(works))
        except Exception as error:
            return self._retry(plan)(error)

    def start(self) -> "Future[Floats]":
        """Make it in the background."""
        begun = self._begin_in_place()
        if begun:
            return self._session.submit([partial(self._finish_in_place, begun)])[0]
        plan = self._own_plan()
        parts = plan.parts(self._session, self.wanted.row_bytes)
        futures = self._session.submit(
            [partial(self._fetch, plan.routes, shard, keys) for shard, keys, _ in parts]
        )
        return combine(futures, partial(self._finish, plan, parts), or_else=self._retry(plan))

    def prefetch(self) -> "Future[None]":
        """Have the shards bring the rows into memory, and send none."""
        plan = self._own_plan()
        parts = plan.parts(self._session, self.wanted.row_bytes)
        return combine(
            self._session.submit(
                [partial(self._fetch, plan.routes, s, keys, prefetch=True) for s, keys, _ in parts]
            ),
            lambda _: None,
            or_else=self._ignore_stale,
        )

    @staticmethod
    def _ignore_stale(error: BaseException) -> None:
        if not isinstance(error, StaleRouteError):  # else the rows are elsewhere: nothing is lost
            raise error

    def plan(self) -> Plan:
        """Of its keys, by the routing that holds now."""
        return Plan.of(self._session, self.wanted.keys, self._distinct)

    def _own_plan(self) -> Plan:
        """The same, of keys that stay what they are whatever the caller does to its own."""
        plan = self.plan()
        return plan if plan.inverse is not None else replace(plan, keys=plan.keys.copy())

    def of(self, keys: Keys) -> Wanted:
        """What is wanted, of some keys alone."""
        return replace(self.wanted, keys=keys)

    def shaped(self, rows: Floats) -> Floats:
        """Rows [n, dim] in the shape of the caller's keys."""
        return rows.reshape(*self._shape, self.wanted.dim)

    def _begin_in_place(self) -> PullInPlace | None:
        if self.wanted.wire != "float32":  # the same values come from shards near and far
            return None
        return PullInPlace.begin(self._session, [self.wanted])

    def _finish_in_place(self, begun: PullInPlace) -> Floats:
        rows = begun.finish()
        if rows is not None:
            return self.shaped(rows[0])
        plan = Plan.of(self._session, begun.keys()[0], self._distinct)
        return self._retry(plan)(StaleRouteError())

    def _retry(self, plan: Plan) -> Callable[[BaseException], Floats]:
        """Makes it anew by the routing that holds now, where that is what was wrong.

        What shards gave is given back first: another may have refused. All is done on this thread:
        it may be one of the helpers, and they must not wait for each other.
        """

        def retry(error: BaseException) -> Floats:
            self._release()
            limit = time.monotonic() + self._session.timeout_s
            stale = plan.routes
            while isinstance(error, StaleRouteError) and time.monotonic() < limit:
                self._session.refresh(stale)
                stale = self._session.routes
                parts = split(self._session, stale, plan.keys, self.wanted.row_bytes)
                try:
                    replies = [self._fetch(stale, shard, keys) for shard, keys, _ in parts]
                except Exception as another:
                    error = another
                    self._release()
                    continue
                return self._finish(plan, parts, replies)
            raise as_shard_error(self._session, error)

        return retry

    def gathered(self, plan: Plan, parts: Sequence[Part], rows: Sequence[memoryview]) -> Floats:
        """The rows of the messages at the places of the caller's keys."""
        wanted = self.wanted
        if wanted.wire == "float16":
            for some, (_, keys, _) in zip(rows, parts, strict=True):
                self._check_range(keys, some)
        in_order = len(parts) == 1 and parts[0][2] is None and plan.inverse is None
        if in_order and wanted.wire == "float32" and not rows[0].readonly:
            lying = np.frombuffer(rows[0], np.float32)
            if lying.ctypes.data % ALIGNMENT == 0:
                return self.shaped(lying)
        pieces = [(some, part[2]) for some, part in zip(rows, parts, strict=True)]
        flat = _native.gather(pieces, len(plan.keys), plan.inverse, wanted.dim, wanted.wire)
        return self.shaped(flat)

    def _finish(self, plan: Plan, parts: Sequence[Part], replies: Sequence[Fetched]) -> Floats:
        try:
            return self.gathered(plan, parts, [reply.rows[0] for reply in replies])
        finally:
            self._release()

    def _check_range(self, keys: Keys, rows: memoryview) -> None:
        weights = np.frombuffer(rows, "<f2").reshape(len(keys), self.wanted.dim)
        beyond = np.abs(weights) >= FLOAT16_END
        if beyond.any():
            raise TableError(
                f"table {self.wanted.table!r}, key {keys[beyond.any(axis=1).argmax()]}: a weight "
                f"of {FLOAT16_END:g} or beyond, which wire='float16' cannot carry; pull with "
                "wire='bfloat16' or 'float32'"
            )

    def _release(self) -> None:
        while self._lent:
            self._lent.pop().release()

    def _fetch(self, routes: Routes, shard: Shard, keys: Keys, prefetch: bool = False) -> Fetched:
        fetched = fetch(self._session, routes, shard, [self.of(keys)], prefetch)
        self._lent.append(fetched)
        return fetched


def as_shard_error(session: Session, error: BaseException) -> BaseException:
    """The error, in words of the user's where shards went by different routings for too long."""
    if not isinstance(error, StaleRouteError):
        return error
    first = session.shards[0]
    return ShardError(
        first.index,
        first.address,
        grpc.StatusCode.ABORTED,
        f"and others went by different routings for {session.timeout_s:g} s; finish the reshard "
        "that was begun: repeat it",
    )


def split(
    session: Session, routes: Routes, keys: Keys, row_bytes: int
) -> list[tuple[Shard, Keys, Positions]]:
    """Keys by shard, in messages of a good size, with their positions in `keys`."""
    shards = session.shards_of(routes)
    if len(shards) == 1:
        groups = [(keys, np.arange(len(keys), dtype=np.int64))]
    else:
        groups = _native.partition(keys, routes.route, len(shards))
    step = max(1, MESSAGE_BYTES // row_bytes)
    return [
        (shard, part[begin : begin + step], positions[begin : begin + step])
        for shard, (part, positions) in zip(shards, groups, strict=True)
        for begin in range(0, len(part), step)
    ]
