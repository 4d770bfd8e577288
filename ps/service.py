"""The handlers of one shard: checks what arrives, then hands it to the engine."""

import logging
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from protos import parameter_server_pb2 as pb
from protos.codec import payload_prefix, unpack
from protos.parameter_server_pb2_grpc import ParameterServerServicer
from ps import _native, checkpoint
from ps.errors import CheckpointError, TableError
from ps.spec import check_spec, describe_difference, make_table, nearest

MAX_REPLY_BYTES = 1 << 30
MAX_CLIENT_NAME = 256
_REPEATED, _TOO_OLD, _EARLIER_EPOCH = 1, 2, 3
_log = logging.getLogger("heterps.ps")
R = TypeVar("R")


class _RefusalError(Exception):
    """A request that is answered with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def _invalid(text: str) -> NoReturn:
    raise _RefusalError(grpc.StatusCode.INVALID_ARGUMENT, text)


def _guarded(context: grpc.ServicerContext, work: Callable[[], R]) -> R:
    """Run a handler; whatever it raises becomes a status, and only surprises are logged."""
    try:
        return work()
    except _RefusalError as error:
        code, text = error.code, str(error)
    except (DecodeError, TableError) as error:
        code, text = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    except CheckpointError as error:
        code, text = grpc.StatusCode.FAILED_PRECONDITION, str(error)
    except MemoryError:
        code, text = grpc.StatusCode.RESOURCE_EXHAUSTED, "the shard has no memory left for this"
    except Exception as error:
        _log.exception("a handler failed")
        code, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
    return context.abort(code, text[:2000])


class ParameterService(ParameterServerServicer):
    """One shard's tables. Any bytes a caller sends end in a reply or a status."""

    def __init__(self) -> None:
        self._tables: checkpoint.Tables = {}
        self._window = _native.Window()
        self._lock = threading.Lock()  # the dictionary and window; held briefly
        self._files = threading.Lock()  # one save or load at a time

    def restore(self, directory: Path, shard: int, shards: int) -> int:
        """Take the rows that `shard` of `shards` has in a checkpoint; returns their number.

        Raises:
            CheckpointError: nothing was changed.
        """
        manifest = checkpoint.read_manifest(directory)
        with self._files:
            tables, window = checkpoint.load_tables(manifest, shard, shards)
            with self._lock:
                for name, (spec, _) in tables.items():
                    have = self._tables.get(name)
                    if have is not None and have[0] != spec:
                        raise CheckpointError(
                            f"{directory}: table {name!r} differs from the one in use: "
                            f"{describe_difference(have[0], spec)}"
                        )
                self._tables.update(tables)
                if window is not None:
                    self._window = window
        rows = sum(table.rows for _, table in tables.values())
        _log.info("restored %d rows of %d tables from %s", rows, len(tables), directory)
        return rows

    # Data: the message's bytes in, the reply's bytes out.

    def pull(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Pull, raw: rows are written once, straight into the reply."""
        return _guarded(context, lambda: self._pull(request))

    def push(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """Push, raw: keys and gradients are read where gRPC put them."""
        return _guarded(context, lambda: self._push(request))

    def _pull(self, request: bytes) -> bytes:
        head, payload = unpack(pb.PullRequest, request)
        table = self._find(head.table, head.dim)
        if head.count * 8 != len(payload):
            _invalid(
                f"Pull of table {head.table!r}: the payload has {len(payload)} bytes; expected "
                f"{head.count * 8} for {head.count} keys"
            )
        size = head.count * head.dim * 4
        if size > MAX_REPLY_BYTES:
            _invalid(
                f"Pull of table {head.table!r}: the reply would have {size} bytes; expected at "
                f"most {MAX_REPLY_BYTES}: pull in parts"
            )
        prefix = payload_prefix(pb.PullReply(dim=head.dim, count=head.count), size)
        return table.pull_message(prefix, payload, head.read_only)

    def _push(self, request: bytes) -> bytes:
        head, payload = unpack(pb.PushRequest, request)
        table = self._find(head.table, head.dim)
        expected = head.count * (8 + 4 * head.dim)
        if expected != len(payload):
            _invalid(
                f"Push to table {head.table!r}: the payload has {len(payload)} bytes; expected "
                f"{expected} for {head.count} keys and gradients of dim {head.dim}"
            )
        if not 1 <= len(head.client) <= MAX_CLIENT_NAME:
            _invalid(f"Push: client has {len(head.client)} characters; expected 1 to 256")
        keys, grads = payload[: 8 * head.count], payload[8 * head.count :]
        try:
            verdict = table.push_once(
                self._window, head.client, head.epoch, head.sequence, keys, grads
            )
        except ValueError as error:
            _invalid(f"Push to table {head.table!r}: {error}")
        who = f"client {head.client!r} epoch {head.epoch} sequence {head.sequence}"
        if verdict == _TOO_OLD:
            raise _RefusalError(
                grpc.StatusCode.OUT_OF_RANGE,
                f"Push of {who}: more than {_native.WINDOW} pushes behind its newest, so whether "
                "it was applied is no longer known; it was not applied now",
            )
        if verdict == _EARLIER_EPOCH:
            raise _RefusalError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"Push of {who}: a later epoch of this client has pushed since; two clients must "
                "not share a client_id",
            )
        return pb.PushReply(applied=verdict != _REPEATED).SerializeToString()

    # The same two for a caller that goes through protobuf.

    def Pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> pb.PullReply:  # noqa: N802
        """Pull as an ordinary method."""
        return pb.PullReply.FromString(self.pull(request.SerializeToString(), context))

    def Push(self, request: pb.PushRequest, context: grpc.ServicerContext) -> pb.PushReply:  # noqa: N802
        """Push as an ordinary method."""
        return pb.PushReply.FromString(self.push(request.SerializeToString(), context))

    # Control: ordinary protobuf.

    def CreateTable(  # noqa: N802
        self, request: pb.CreateTableRequest, context: grpc.ServicerContext
    ) -> pb.CreateTableReply:
        """Make a table; doing it again with the same spec changes nothing."""

        def work() -> pb.CreateTableReply:
            spec = pb.TableSpec()
            spec.CopyFrom(request.table)
            check_spec(spec)
            with self._lock:
                have = self._tables.get(spec.name)
                if have is None:
                    self._tables[spec.name] = (spec, make_table(spec))
                    _log.info("table %s: dim %d, %s", spec.name, spec.dim, spec.optimizer.kind)
                elif have[0] != spec:
                    raise _RefusalError(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"table {spec.name!r} exists with another spec: "
                        f"{describe_difference(have[0], spec)}",
                    )
            return pb.CreateTableReply(created=have is None)

        return _guarded(context, work)

    def DropTables(  # noqa: N802
        self, request: pb.DropTablesRequest, context: grpc.ServicerContext
    ) -> pb.DropTablesReply:
        """Forget the tables whose names begin with a prefix; safe to repeat."""

        def work() -> pb.DropTablesReply:
            if not request.prefix:
                _invalid("DropTables: the prefix is empty; expected the beginning of names")
            with self._lock:
                names = [name for name in self._tables if name.startswith(request.prefix)]
                for name in names:
                    del self._tables[name]
            _log.info("dropped %s", ", ".join(names) or f"nothing beginning {request.prefix!r}")
            return pb.DropTablesReply(tables=names)

        return _guarded(context, work)

    def Save(self, request: pb.SaveRequest, context: grpc.ServicerContext) -> pb.SaveReply:  # noqa: N802
        """Write this shard's files into a folder that is there already."""

        def work() -> pb.SaveReply:
            _check_shard(request.shard, request.shards)
            folder = Path(request.directory)
            if not folder.is_absolute() or not folder.is_dir():
                _invalid(
                    f"Save: {request.directory!r} is not a directory this shard can see; expected "
                    "an absolute path on a file system shared with the client"
                )
            began = time.monotonic()
            with self._files:
                with self._lock:
                    tables = {
                        name: table
                        for name, table in self._tables.items()
                        if name.startswith(request.prefix)
                    }
                    window = self._window
                files = checkpoint.write_tables(
                    folder, tables, request.shard, request.shards, window
                )
            _log.info(
                "saved %d rows to %s in %.2f s",
                sum(f.rows for f in files),
                folder,
                time.monotonic() - began,
            )
            return pb.SaveReply(files=files)

        return _guarded(context, work)

    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadReply:  # noqa: N802
        """Replace the tables a checkpoint names by their rows there; others stay."""

        def work() -> pb.LoadReply:
            _check_shard(request.shard, request.shards)
            rows = self.restore(Path(request.directory), request.shard, request.shards)
            return pb.LoadReply(rows=rows)

        return _guarded(context, work)

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsReply:  # noqa: N802
        """What the tables hold and what the process uses."""

        def work() -> pb.StatsReply:
            with self._lock:
                tables = dict(self._tables)
            return pb.StatsReply(
                tables=[
                    pb.TableStats(
                        name=name,
                        dim=spec.dim,
                        rows=table.rows,
                        bytes=table.nbytes,
                        pulled=table.pulled,
                        pushed=table.pushed,
                    )
                    for name, (spec, table) in sorted(tables.items())
                ],
                cpu_seconds=time.process_time(),
                resident_bytes=_resident_bytes(),
            )

        return _guarded(context, work)

    def _find(self, name: str, dim: int) -> _native.Table:
        found = self._tables.get(name)
        if found is None:
            known = sorted(self._tables)
            raise _RefusalError(
                grpc.StatusCode.NOT_FOUND,
                f"table {name[:140]!r} does not exist here; the shard has "
                f"{', '.join(known) or 'no tables'}{nearest(name[:140], known)}",
            )
        if found[0].dim != dim:
            _invalid(f"table {name!r} has dim {found[0].dim}; the request says {dim}")
        return found[1]


def _check_shard(shard: int, shards: int) -> None:
    if not (1 <= shards <= _native.BUCKETS and shard < shards):
        _invalid(f"shard {shard} of {shards}; expected 0 <= shard < shards <= {_native.BUCKETS}")


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0
