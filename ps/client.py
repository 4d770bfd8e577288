"""The sharded client of the parameter server."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from protos.codec import payload_prefix, unpack
from ps import _native, checkpoint
from ps.arrays import Floats, Keys, as_gradients, as_keys
from ps.errors import TableError
from ps.session import Session, Shard, combine
from ps.spec import make_spec, nearest

# Larger batches travel as several messages: gRPC is fastest with 1-16 MiB.
MESSAGE_BYTES = 8 << 20
FILES_TIMEOUT_S = 600.0
_Part = tuple[Shard, Keys, NDArray[np.int64]]


class ParameterClient:
    """Rows of embedding tables on parameter-server shards.

    Thread-safe. A forked child connects anew on its first call, under a name of its own.

    Args:
        addresses: host:port of every shard, in shard order; the same for every client.
        timeout_s: how long a call may take, and how long an unreachable shard is tried.
        client_id: names this client to the shards, which apply each of its pushes once. Only
            one client may use a name at a time; made up when not given.
    """

    def __init__(
        self, addresses: Sequence[str], timeout_s: float = 30, client_id: str | None = None
    ) -> None:
        if isinstance(addresses, str) or not 1 <= len(addresses) <= _native.BUCKETS:
            raise ValueError(
                f"addresses={addresses!r}; expected a list of 1 to {_native.BUCKETS} host:port"
            )
        for address in addresses:
            if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
                raise ValueError(f"addresses: {address!r}; expected host:port")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}; expected a positive number of seconds")
        if client_id is not None and not 1 <= len(client_id) <= 200:
            raise ValueError(f"client_id: {len(client_id)} characters; expected 1 to 200")
        self._addresses = list(addresses)
        self._timeout_s = float(timeout_s)
        self._client_id = client_id
        self._lock = threading.Lock()
        self._current: Session | None = None
        self._closed = False
        self._dims: dict[str, int] = {}
        self._pending: set[Future[None]] = set()

    @property
    def addresses(self) -> list[str]:
        """host:port of every shard."""
        return list(self._addresses)

    def create_table(self, name: str, dim: int, **options: Any) -> bool:
        """Make a table on every shard; with the same spec again, do nothing.

        Args:
            name: letters, digits, `_`, `-` and `.`.
            dim: floats a row.
            options: optimizer, learning_rate, initializer, scale, seed, ... of
                `ps.spec.make_spec`.

        Returns:
            Whether it was new.

        Raises:
            TableError: naming the argument, its value and what was expected.
            ShardError: the table is there with another spec, or a shard did not answer.
        """
        request = pb.CreateTableRequest(table=make_spec(name, dim, **options))
        replies = self._all(
            lambda shard: (
                shard.call(shard.stub.CreateTable, request, f"CreateTable of {name!r}").created
            )
        )
        self._dims[name] = dim
        return any(replies)

    def pull(self, table: str, keys: Any, read_only: bool = False) -> NDArray[np.float32]:
        """Rows of `keys` (integers of any shape): float32 [*keys.shape, dim].

        Repeated keys are fetched once. A key without a row gets one.

        Args:
            table: its name.
            keys: NumPy or torch; int64 keeps its bits.
            read_only: a missing key reads its first value and grows no row.

        Raises:
            TableError: wrong keys, or no such table.
            ShardError: a shard did not answer or refused.
        """
        works, finish = self._plan_pull(table, keys, read_only, distinct=False)
        return finish(self._session().run(works))

    def pull_unique(
        self, table: str, unique_keys: Any, read_only: bool = False
    ) -> NDArray[np.float32]:
        """`pull` for keys known to be distinct, which saves finding that out."""
        works, finish = self._plan_pull(table, unique_keys, read_only, distinct=True)
        return finish(self._session().run(works))

    def pull_async(
        self, table: str, keys: Any, read_only: bool = False
    ) -> "Future[NDArray[np.float32]]":
        """`pull` as a future. Its order among other calls under way is not defined."""
        works, finish = self._plan_pull(table, keys, read_only, distinct=False)
        return combine(self._session().submit(works), finish)

    def push(self, table: str, keys: Any, grads: Any) -> None:
        """Apply gradients, float32 [*keys.shape, dim]; those of equal keys sum first.

        Returns once every shard has acknowledged. Each shard applies it exactly once, however
        often it had to be sent. After a ShardError other shards may have applied their part.

        Raises:
            TableError: wrong keys, shapes or dtypes, no such table, or a gradient that is not
                finite (names its key); nothing was applied.
            ShardError: a shard did not answer or refused.
        """
        self._session().run(self._plan_push(table, keys, grads))

    def push_async(self, table: str, keys: Any, grads: Any) -> "Future[None]":
        """`push` as a future; the arrays may be reused as soon as this returns."""
        works = self._plan_push(table, keys, grads)
        future = combine(self._session().submit(works), lambda _: None)
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._forget)
        return future

    def flush(self) -> None:
        """Wait until every `push_async` so far is acknowledged or has failed."""
        with self._lock:
            pending = list(self._pending)
        wait(pending)

    def save(
        self, path: str | Path, timeout_s: float = FILES_TIMEOUT_S, *, prefix: str = ""
    ) -> None:
        """Write a checkpoint directory, replacing an earlier checkpoint in one step.

        Args:
            path: the directory to write.
            timeout_s: for each shard.
            prefix: only tables whose names begin so.

        The path must mean the same place to this process and to every shard. Each shard's
        files are one cut of its tables; pushes of this client made before are in it.

        Raises:
            CheckpointError: something that is not a checkpoint is at `path`.
            ShardError: a shard failed; what was at `path` is untouched.
        """
        self.flush()
        with checkpoint.writing(path) as folder:
            shards = len(self._addresses)

            def one(shard: Shard) -> pb.SaveReply:
                request = pb.SaveRequest(
                    directory=str(folder), shard=shard.index, shards=shards, prefix=prefix
                )
                return shard.call(shard.stub.Save, request, f"Save to {folder}", timeout_s)

            replies = self._all(one)
            files = [(i, f) for i, reply in enumerate(replies) for f in reply.files]
            checkpoint.write_manifest(folder, shards, files)

    def load(self, path: str | Path, timeout_s: float = FILES_TIMEOUT_S) -> int:
        """Replace the tables of a checkpoint by its rows, written by any number of shards.

        Tables that the checkpoint does not have stay. No push may be under way.

        Returns:
            The number of rows loaded.

        Raises:
            CheckpointError: it is missing or damaged; no shard was asked to load it.
            ShardError: a shard failed.
        """
        self.flush()
        manifest = checkpoint.read_manifest(path)
        checkpoint.verify(manifest)
        shards = len(self._addresses)
        directory = str(Path(path).absolute())

        def one(shard: Shard) -> int:
            request = pb.LoadRequest(directory=directory, shard=shard.index, shards=shards)
            return shard.call(shard.stub.Load, request, f"Load of {path}", timeout_s).rows

        rows: int = sum(self._all(one))
        self._dims.clear()
        return rows

    def stats(self) -> list[pb.StatsReply]:
        """What every shard holds and uses, in shard order."""
        return self._all(lambda shard: shard.call(shard.stub.Stats, pb.StatsRequest(), "Stats"))

    def close(self) -> None:
        """Wait for calls under way and disconnect; safe to repeat."""
        with self._lock:
            session, self._current, self._closed = self._current, None, True
        if session is not None and session.pid == os.getpid():
            session.close()

    def __enter__(self) -> "ParameterClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _session(self) -> Session:
        session = self._current
        if session is not None and session.pid == os.getpid():
            return session
        with self._lock:
            if self._closed:
                raise RuntimeError("this ParameterClient is closed")
            session = self._current
            if session is None or session.pid != os.getpid():
                session = Session(self._addresses, self._timeout_s, self._client_id)
                self._current = session
            return session

    def _all(self, one: Callable[[Shard], Any]) -> list[Any]:
        session = self._session()
        return session.run([partial(one, shard) for shard in session.shards])

    def _forget(self, future: "Future[None]") -> None:
        with self._lock:
            self._pending.discard(future)

    def _dim(self, table: str) -> int:
        """The table's dim; asks a shard about one that another client made."""
        dim = self._dims.get(table)
        if dim is None:
            shard = self._session().shards[0]
            reply = shard.call(shard.stub.Stats, pb.StatsRequest(), "Stats")
            self._dims.update({t.name: t.dim for t in reply.tables})
            dim = self._dims.get(table)
        if dim is None:
            known = sorted(self._dims)
            raise TableError(
                f"table {table!r} does not exist on the parameter server; it has "
                f"{', '.join(known) or 'no tables'}{nearest(table, known)}: see create_table"
            )
        return dim

    def _parts(self, keys: Keys, row_bytes: int) -> list[_Part]:
        """Keys by shard, in messages of a good size, with their positions in `keys`."""
        shards = self._session().shards
        if len(shards) == 1:
            split = [(keys, np.arange(len(keys), dtype=np.int64))]
        else:
            split = _native.partition(keys, len(shards))
        step = max(1, MESSAGE_BYTES // row_bytes)
        return [
            (shard, part[begin : begin + step], positions[begin : begin + step])
            for shard, (part, positions) in zip(shards, split, strict=True)
            for begin in range(0, len(part), step)
        ]

    def _plan_pull(
        self, table: str, keys: Any, read_only: bool, distinct: bool
    ) -> tuple[list[Callable[[], memoryview]], Callable[[list[memoryview]], Floats]]:
        dim = self._dim(table)
        flat, shape = as_keys(keys)
        inverse: NDArray[np.int64] | None = None
        if not distinct:
            unique, inverse = _native.unique(flat)
            if len(unique) == len(flat):
                inverse = None  # first-occurrence order: they are the keys given
            flat = unique
        parts = self._parts(flat, 4 * dim)

        def fetch(shard: Shard, part: Keys) -> memoryview:
            head = pb.PullRequest(table=table, dim=dim, count=len(part), read_only=read_only)
            request = payload_prefix(head, part.nbytes) + part.tobytes()
            reply = shard.call(shard.pull, request, f"Pull of {len(part)} rows of {table!r}")
            try:
                return _rows(reply, dim, len(part))
            except (DecodeError, ValueError) as error:
                raise RuntimeError(
                    f"parameter-server shard {shard.index} ({shard.address}) sent a malformed "
                    f"reply to Pull of {table!r}: {error}"
                ) from None

        def finish(replies: list[memoryview]) -> Floats:
            rows = [(r, p[2]) for r, p in zip(replies, parts, strict=True)]
            return _native.gather(rows, len(flat), inverse, dim).reshape(*shape, dim)

        return [partial(fetch, s, k) for s, k, _ in parts], finish

    def _plan_push(self, table: str, keys: Any, grads: Any) -> list[Callable[[], Any]]:
        dim = self._dim(table)
        flat, shape = as_keys(keys)
        values = as_gradients(grads, shape, dim)
        unique, inverse = _native.unique(flat)
        if len(unique) < len(flat):
            values = _native.segment_sum(inverse, values, len(unique), dim)
        try:  # here, so that no shard has applied its part when another refuses
            _native.check_finite(unique, values, dim)
        except ValueError as error:
            raise TableError(f"table {table!r}: {error}") from None
        session = self._session()
        works: list[Callable[[], Any]] = []
        for shard, part, positions in self._parts(unique, 8 + 4 * dim):
            head = pb.PushRequest(
                table=table,
                dim=dim,
                count=len(part),
                client=session.client,
                epoch=session.epoch,
                sequence=shard.next_sequence(),
            )
            prefix = payload_prefix(head, len(part) * (8 + 4 * dim))
            request = _native.push_message(prefix, part, values, positions, dim)
            what = f"Push of {len(part)} rows to {table!r}"
            works.append(partial(shard.call, shard.push, request, what))
        return works


def _rows(reply: bytes, dim: int, count: int) -> memoryview:
    head, payload = unpack(pb.PullReply, reply)
    if (head.dim, head.count, len(payload)) != (dim, count, 4 * dim * count):
        raise ValueError(
            f"{head.count} rows of dim {head.dim} in {len(payload)} bytes; "
            f"expected {count} of {dim}"
        )
    return payload
