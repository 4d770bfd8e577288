"""The client: tables that lie on several shards, used as one."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chassis.near import did_you_mean
from protos import parameter_server_pb2 as pb
from protos.codec import unpack
from ps.client.commit import StepClient
from ps.client.connected import Connected
from ps.client.load import load
from ps.client.pull import Pull
from ps.client.pull_many import PullMany
from ps.client.push import Push
from ps.client.save import save
from ps.client.session import Shard
from ps.client.shares import check_shares
from ps.engine import _native
from ps.errors import TableError
from ps.table.arrays import as_gradients, as_keys, check_range
from ps.table.checks import check_wire
from ps.table.rules import WIRE_BYTES
from ps.table.spec import make_spec
from ps.table.table import without_share
from ps.table.usage import Usage

FILES_TIMEOUT_S = 600.0
_ADVANCE_PAUSE_S = 0.02


class ParameterClient(Connected, StepClient):
    """Rows of embedding tables on parameter-server shards.

    Thread-safe. A forked child connects anew on its first call, under a name of its own.

    Args:
        addresses: host:port of every shard, in shard order; the same for every client.
        timeout_s: how long a call may take, and how long an unreachable shard is tried.
        client_id: names this client to the shards, which apply each of its pushes once. Only
            one client may use a name at a time; made up when not given.
        wire: how rows and gradients travel: float32, float16 or bfloat16; of tables, unless they
            are created with another.
        channels: connections to each shard.
        shared_memory: use it with shards of this host and user.
        streams: use them with all others; without, gRPC.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float = 30,
        client_id: str | None = None,
        *,
        wire: str = "float32",
        channels: int = 1,
        shared_memory: bool = True,
        streams: bool = True,
    ) -> None:
        if wire not in WIRE_BYTES:
            raise ValueError(f"wire={wire!r}; expected {', '.join(WIRE_BYTES)}")
        StepClient.__init__(self)
        Connected.__init__(
            self,
            addresses,
            timeout_s,
            client_id,
            channels=channels,
            shared_memory=shared_memory,
            streams=streams,
        )
        self._wire = wire
        self._wires: dict[str, str] = {}  # of tables that have their own
        self._specs: dict[str, pb.TableSpec] = {}
        self._pending: set[Future[None]] = set()

    # Tables.

    def create_table(self, name: str, dim: int, **options: Any) -> bool:
        """Make a table on every shard; with the same spec again, do nothing.

        Args:
            name: letters, digits, `_`, `-` and `.`.
            dim: floats a row.
            options: `wire`, how its rows and gradients travel from and to this client, as those of
                all tables unless given; optimizer, learning_rate, initializer, scale, seed, ... of
                `ps.table.spec.make_spec`.

        Returns:
            Whether it was new.

        Raises:
            TableError: naming the argument, its value and what was expected.
            ShardError: the table is there with another spec, or a shard did not answer.
        """
        wire: str | None = options.pop("wire", None)
        spec = make_spec(name, dim, **options)
        if wire is not None:
            check_wire(name, wire)
            self._wires[name] = wire
        self._look_up(name)  # so that no shard makes it where another refuses

        def one(shard: Shard) -> bool:
            asked = pb.TableSpec()
            asked.CopyFrom(spec)
            asked.share = self.session().routes.number_for(shard)
            request = pb.CreateTableRequest(table=asked)
            what = f"CreateTable of {name!r}"
            return bool(shard.call(shard.stub.CreateTable, request, what).created)

        replies = self.on_all_of_one_routing(one)
        self._specs[name] = spec
        return any(replies)

    def drop_tables(self, prefix: str) -> list[str]:
        """Forget the tables whose names begin with `prefix`; their names."""
        request = pb.DropTablesRequest(prefix=prefix)
        replies = self.on_all_of_one_routing(
            lambda shard: list(shard.call(shard.stub.DropTables, request, "DropTables").tables)
        )
        self._specs.clear()
        return sorted({name for names in replies for name in names})

    def shrink(self, table: str, *, step: int = 0, decay: bool = True) -> int:
        """Apply the table's eviction rules now.

        Args:
            table: its name.
            step: the trainer's, for `ttl_steps`.
            decay: let scores decay first.

        Returns:
            The number of keys removed.
        """
        self.spec(table)
        request = pb.ShrinkRequest(table=table, step=step, decay=decay, time_s=int(time.time()))
        return sum(
            self.on_all(
                lambda shard: (
                    shard.call(
                        shard.stub.Shrink, request, f"Shrink of {table!r}", FILES_TIMEOUT_S
                    ).evicted
                )
            )
        )

    def keys(self, table: str, limit: int = 100) -> NDArray[np.uint64]:
        """Some keys that have a row: uint64 [at most `limit`], in no order that means anything."""
        self.spec(table)
        request = pb.KeysRequest(table=table, limit=limit).SerializeToString()

        def one(shard: Shard) -> NDArray[np.uint64]:
            reply = shard.call(shard.keys, request, f"Keys of {table!r}")
            return np.frombuffer(unpack(pb.KeysReply, reply)[1], np.uint64)

        return np.concatenate(self.on_all(one))[:limit]

    def spec(self, table: str) -> pb.TableSpec:
        """What a table is; asks a shard about one that another client made.

        Raises:
            TableError: there is no such table, or it was made with other shards.
        """
        spec = self._specs.get(table)
        if spec is None:
            there = self._look_up(table)
            if table not in there:
                known = sorted(there)
                raise TableError(
                    f"table {table!r} does not exist on the parameter server; it has "
                    f"{', '.join(known) or 'no tables'}{did_you_mean(table, known)}: see "
                    "create_table"
                )
            spec = self._specs[table] = without_share(there[table])
        return spec

    def wire_of(self, table: str) -> str:
        """How rows and gradients of a table travel."""
        return self._wires.get(table, self._wire)

    # Rows.

    def pull(self, table: str, keys: Any, read_only: bool = False) -> NDArray[np.float32]:
        """Rows of `keys` (integers of any shape): float32 [*keys.shape, dim].

        Repeated keys are fetched once. A key that was never pushed to reads its first value.

        Args:
            table: its name.
            keys: NumPy or torch; int64 keeps its bits.
            read_only: rows that lie on disk are read there, and stay.

        Raises:
            TableError: wrong keys, or no such table.
            ShardError: a shard did not answer or refused.
        """
        return self._pull(table, keys, read_only, distinct=False).run()

    def pull_unique(
        self, table: str, unique_keys: Any, read_only: bool = False
    ) -> NDArray[np.float32]:
        """`pull` for keys known to be distinct, which saves finding that out."""
        return self._pull(table, unique_keys, read_only, distinct=True).run()

    def pull_many(
        self, keys: Mapping[str, Any], read_only: bool = False, *, distinct: bool = False
    ) -> dict[str, NDArray[np.float32]]:
        """`pull` of several tables, in one message to each shard where they fit one.

        Args:
            keys: of each table, integers of any shape.
            read_only: rows that lie on disk are read there, and stay.
            distinct: in no table does a key come twice, which saves finding that out.

        Raises:
            TableError: wrong keys, or no such table.
            ShardError: a shard did not answer or refused.
        """
        rows = self.ask_many(keys, read_only, distinct=distinct).run()
        return dict(zip(keys, rows, strict=True))

    def ask_many(
        self, keys: Mapping[str, Any], read_only: bool = False, *, distinct: bool = False
    ) -> PullMany:
        """What `pull_many` runs, to be run later, or to go along with a commit."""
        pulls = [self._pull(table, some, read_only, distinct) for table, some in keys.items()]
        return PullMany(self.session(), pulls)

    def pull_async(
        self, table: str, keys: Any, read_only: bool = False, *, distinct: bool = False
    ) -> "Future[NDArray[np.float32]]":
        """`pull` as a future. Its order among other calls under way is not defined."""
        return self._pull(table, keys, read_only, distinct=distinct).start()

    def prefetch(self, table: str, keys: Any) -> "Future[None]":
        """Have the shards bring rows from disk into memory."""
        return self._pull(table, keys, read_only=False, distinct=False).prefetch()

    def push(self, table: str, keys: Any, grads: Any, **how: Any) -> None:
        """Apply gradients, float32 [*keys.shape, dim]; those of equal keys sum first.

        Returns once every shard has acknowledged. Each shard applies it exactly once, however
        often it had to be sent. After a ShardError other shards may have applied their part.

        Args:
            table: its name.
            keys: NumPy or torch; int64 keeps its bits.
            grads: NumPy or torch floats.
            how: `rate`, times the learning rate; `step`, of the trainer, for `ttl_steps`;
                `shows` and `clicks`, float32 [*keys.shape], for scores and counts (one show each
                unless given); `position`, of this client's reader once this push is applied,
                kept in checkpoints.

        Raises:
            TableError: wrong keys, shapes or dtypes, no such table, or a gradient that is not
                finite (names its key); nothing was applied.
            ShardError: a shard did not answer or refused.
        """
        self._push(table, keys, grads, **how).run()

    def push_async(
        self, table: str, keys: Any, grads: Any, *, distinct: bool = False, **how: Any
    ) -> "Future[None]":
        """`push` as a future; the arrays may be reused as soon as this returns.

        Args:
            table, keys, grads, how: as of `push`.
            distinct: the keys are known to be distinct, which saves finding that out.
        """
        return self._track(self._push(table, keys, grads, distinct=distinct, **how).start())

    def assign(self, table: str, keys: Any, values: Any) -> None:
        """Write weights, float32 [*keys.shape, dim]; of equal keys the last holds."""
        self._push(table, keys, values, kind="assign").run()

    def add(self, table: str, keys: Any, deltas: Any) -> None:
        """Add to weights, past the optimizer; those of equal keys sum."""
        self._push(table, keys, deltas, kind="add").run()

    def flush(self) -> None:
        """Wait until every call in the background so far is acknowledged or has failed."""
        with self._lock:
            pending = list(self._pending)
        wait(pending)

    def advance(
        self,
        group: str,
        worker: int,
        workers: int,
        clock: int,
        staleness: int = 0,
        timeout_s: float | None = None,
        expire_s: float = 0.0,
    ) -> int:
        """Tell that the pushes of `clock` steps are acknowledged; wait for the slowest worker.

        Returns once it is at most `staleness` steps behind: 0 is a barrier. Workers that push
        faster than others are thus held back (stale-synchronous parallel, Ho et al. 2013).

        Args:
            group: names the workers that wait for each other.
            worker: which one this is.
            workers: of how many.
            clock: steps done.
            staleness: how many steps the slowest may be behind.
            timeout_s: how long to wait; as long as a call unless given.
            expire_s: a worker that has not called for so long counts as dead and holds this one
                back no more, until it calls again; 0 for never. More than a step ever takes.

        Returns:
            The slowest worker's clock.

        Raises:
            ShardError: the first shard did not answer.
            TimeoutError: the slowest worker did not get there.
        """
        shard = self.session().shards[0]
        limit = time.monotonic() + (timeout_s or self._timeout_s)
        while True:
            request = pb.AdvanceRequest(
                group=group,
                worker=worker,
                workers=workers,
                clock=clock,
                staleness=staleness,
                wait_s=min(2.0, max(0.0, limit - time.monotonic())),
                expire_s=expire_s,
            )
            reply = shard.call(shard.stub.Advance, request, f"Advance of {group!r}")
            if reply.ready:
                return int(reply.slowest)
            if time.monotonic() >= limit:
                raise TimeoutError(
                    f"group {group!r}: worker {worker} is at {clock}, the slowest, worker "
                    f"{reply.slowest_worker}, at {reply.slowest}; expected at most {staleness} "
                    "steps between them"
                )
            time.sleep(_ADVANCE_PAUSE_S)  # many wait there, and this one was not let in

    def leave(self, group: str, worker: int, workers: int) -> None:
        """This worker has ended and holds nobody back any more."""
        shard = self.session().shards[0]
        request = pb.AdvanceRequest(group=group, worker=worker, workers=workers, leave=True)
        shard.call(shard.stub.Advance, request, f"Advance of {group!r}")

    # Checkpoints.

    def save(
        self,
        path: str | Path,
        timeout_s: float = FILES_TIMEOUT_S,
        *,
        prefix: str = "",
        mode: str = "checkpoint",
        since: str | Path | None = None,
        held: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint, replacing an earlier one at its place in one step.

        All shards write the same cut while training goes on: of every push it has all or
        nothing. Pushes of this client made before are in it.

        Args:
            path: a directory that every shard and this process see as one, or a URL that fsspec
                knows.
            timeout_s: for each shard.
            prefix: only tables whose names begin so.
            mode: `checkpoint`, all that training needs; `delta`, the same of the rows changed
                since the save at `since`; `base`, weights alone, for serving; `serving`, those
                changed since the base or serving save at `since`.
            since: for delta and serving: the save that it builds on, which must stay.
            held: called once every shard holds pushes and commits back: what is sent from then on
                is not in the save. It is called once: a save that cannot go on after that raises.

        Raises:
            CheckpointError: something that is not a checkpoint is at `path`, or the save at
                `since` cannot be built on.
            ShardError: a shard failed; what was at `path` is untouched.
        """
        self.flush()
        save(self.session(), path, timeout_s, prefix=prefix, mode=mode, since=since, held=held)

    def load(
        self,
        path: str | Path,
        timeout_s: float = FILES_TIMEOUT_S,
        *,
        rename: tuple[str, str] | None = None,
        weights_alone: bool = False,
    ) -> int:
        """Replace the tables of a checkpoint by its rows, written by any number of shards.

        Tables that the checkpoint does not have stay. No push may be under way.

        Args:
            path: of the checkpoint, as of `save`.
            timeout_s: for each shard.
            rename: prefixes, in the checkpoint and here: only tables whose names begin with the
                first are loaded, beginning with the second. What had been applied of clients and
                series is left out, and a table that is there keeps its durability and memory.
            weights_alone: with `rename`: only tables that are there are loaded, and keep their
                specs; their rows begin anew, with the checkpoint's weights and, where both
                count it, usage.

        Returns:
            The number of rows loaded.

        Raises:
            CheckpointError: it is missing or damaged; no shard was asked to load it.
            ShardError: a shard failed.
        """
        self.flush()
        named = None
        if rename is not None:
            before, after = rename
            named = pb.Rename(from_prefix=before, to_prefix=after, weights_alone=weights_alone)
        rows = load(self.session(), path, timeout_s, named)
        self._specs.clear()
        return rows

    def reshard(self, addresses: Sequence[str], timeout_s: float = FILES_TIMEOUT_S) -> int:
        """Spread the tables over other shards while training goes on; the rows moved.

        Args:
            addresses: all shards from now on: those that stay, and new, empty ones.
            timeout_s: for the whole change.

        Raises:
            ShardError: a shard failed. Repeat it: what was begun is taken up or begun anew.
        """
        from ps.client.reshard import reshard

        return reshard(self.session(), list(addresses), timeout_s)

    def stats(self) -> list[pb.StatsReply]:
        """What every shard holds and uses, in shard order."""
        return self.on_all(lambda shard: shard.call(shard.stub.Stats, pb.StatsRequest(), "Stats"))

    def _look_up(self, table: str) -> dict[str, pb.TableSpec]:
        """The tables that the first shard has.

        Raises:
            TableError: a shard has `table` as another share than this client takes it for.
        """
        replies: list[pb.StatsReply] = self.stats()
        routes = self.session().routes
        if not routes.version:
            check_shares(routes.addresses, replies, table)
        return {found.name: found.spec for found in replies[0].tables}

    def _pull(self, table: str, keys: Any, read_only: bool, distinct: bool) -> Pull:
        dim = self.spec(table).dim
        flat, shape = as_keys(keys)
        wire = self.wire_of(table)
        return Pull(self.session(), table, dim, flat, distinct, shape, wire, read_only)

    def _push(
        self,
        table: str,
        keys: Any,
        values: Any,
        *,
        kind: str = "",
        rate: float | None = None,
        step: int = 0,
        shows: Any = None,
        clicks: Any = None,
        position: str = "",
        distinct: bool = False,
    ) -> Push:
        spec = self.spec(table)
        flat, shape = as_keys(keys)
        floats = as_gradients(values, shape, spec.dim)
        usage = Usage.of(spec, shows, clicks, shape)
        unique = flat
        if not distinct:
            unique, inverse = _native.unique(flat)
            if len(unique) < len(flat):
                usage = usage.merged(inverse, len(unique))
                if kind == "assign":
                    last = np.zeros(len(unique), np.int64)
                    last[inverse] = np.arange(len(flat))
                    floats = np.ascontiguousarray(floats[last])
                else:
                    floats = _native.segment_sum(inverse, floats, len(unique), spec.dim)
        try:  # here, so that no shard has applied its part when another refuses
            _native.check_finite(unique, 8, floats, spec.dim)
        except ValueError as error:
            raise TableError(f"table {table!r}: {error}") from None
        if kind != "assign":
            check_range(table, unique, floats, self.wire_of(table))
        head = pb.PushRequest(table=table, dim=spec.dim, kind=kind, step=step, position=position)
        if rate is not None:
            head.rate = rate
        return Push(self.session(), head, unique, floats, usage, self.wire_of(table))

    def _track(self, future: "Future[None]") -> "Future[None]":
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: "Future[None]") -> None:
        with self._lock:
            self._pending.discard(future)
