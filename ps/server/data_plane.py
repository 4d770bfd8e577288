"""Pull and Push of one shard: payloads are used where gRPC, or shared memory, has put them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise

from protos import parameter_server_pb2 as pb
from protos.codec import pack, payload_prefix, unpack
from ps.engine import _native
from ps.errors import StaleRouteError, TableError
from ps.shard.commit import commit_step, stage_part, tally_step
from ps.shard.push import take_apart
from ps.shard.stage import carried_part
from ps.shard.stage import take_apart as take_apart_part
from ps.shard.state import ShardState, now_s
from ps.shm.region import Regions
from ps.table.checks import value_bytes
from ps.table.table import Table

MAX_REPLY_BYTES = 1 << 30
MAX_CLIENT_NAME = 256


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a pull asks of one table.

    Attributes:
        table: which.
        key_bytes: of a key.
        dtype: of the rows.
        keys_bytes, rows_bytes: of all of them.
    """

    table: Table
    key_bytes: int
    dtype: str
    keys_bytes: int
    rows_bytes: int


class DataPlane:
    """What a worker does in every step."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self.regions = Regions()
        self.bytes_in = 0
        self.bytes_out = 0

    def pull(self, request: bytes) -> bytes:
        """The message's bytes in, the reply's bytes out; rows are written once.

        Raises:
            TableError, KeyError, DecodeError, StaleRouteError: nothing was pulled.
        """
        return self._pull(*unpack(pb.PullRequest, request))

    def _pull(self, head: pb.PullRequest, payload: memoryview) -> bytes:
        heads = (head, *head.others)
        asked = [self._asked(one) for one in heads]
        size = sum(one.rows_bytes for one in asked)
        if size > MAX_REPLY_BYTES:
            raise TableError(
                f"Pull of table {head.table!r}: the reply would have {size} bytes; expected at "
                f"most {MAX_REPLY_BYTES}: pull in parts"
            )
        ways = {(bool(one.region), one.prefetch) for one in heads}
        if len(ways) > 1 or any(one.others or one.payload for one in head.others):
            raise TableError(
                f"Pull of table {head.table!r} and {len(head.others)} others: expected all of them "
                "by one way, and others without payload and others"
            )
        keys = self._keys_of(heads, asked, payload)
        self.bytes_in += sum(one.keys_bytes for one in asked)
        reply = pb.PullReply(dim=head.dim, count=head.count)
        if head.prefetch:
            for one, some in zip(asked, keys, strict=True):
                one.table.native.prefetch(some, one.key_bytes)
            return reply.SerializeToString()
        if head.region:
            for of, one, some in zip(heads, asked, keys, strict=True):
                self._pull_into_region(of, one, some)
            message = reply.SerializeToString()
        else:
            prefix = payload_prefix(reply, size)
            pieces = []
            for of, one, some in zip(heads, asked, keys, strict=True):
                pieces.append(
                    one.table.native.pull_message(
                        prefix, some, one.key_bytes, of.read_only, one.dtype
                    )
                )
                prefix = b""
            message = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self.bytes_out += size
        # Buckets that moved away meanwhile have read as if they had no rows.
        for of in heads:
            self._state.check_route(of.route)
        return message

    def _asked(self, head: pb.PullRequest) -> "_Asked":
        """What one table is asked for, checked."""
        table = self._find(head)
        self._state.check_route(head.route)
        table.check_share(head.route)
        key_bytes = head.key_bytes or 8
        where = f"Pull of table {head.table!r}"
        if key_bytes not in (4, 8):
            raise TableError(f"{where}: key_bytes={key_bytes}; expected 4 or 8")
        size = head.count * head.dim * value_bytes(where, head.dtype)
        return _Asked(table, key_bytes, head.dtype or "float32", head.count * key_bytes, size)

    def _keys_of(
        self, heads: Sequence[pb.PullRequest], asked: Sequence["_Asked"], payload: memoryview
    ) -> list[memoryview]:
        """The keys of each table: in its region, or one after the other in the payload."""
        if heads[0].region:
            return [
                self.regions.view(head.region, head.keys_at, one.keys_bytes)
                for head, one in zip(heads, asked, strict=True)
            ]
        ends = [0, *accumulate(one.keys_bytes for one in asked)]
        if ends[-1] != len(payload):
            counts = " and ".join(str(head.count) for head in heads[:8])
            raise TableError(
                f"Pull of table {heads[0].table!r}: the payload has {len(payload)} bytes; expected "
                f"{ends[-1]} for {counts} keys"
            )
        return [payload[begin:end] for begin, end in pairwise(ends)]

    def _pull_into_region(self, head: pb.PullRequest, asked: "_Asked", keys: memoryview) -> None:
        """Write rows to where their client reads them."""
        rows = self.regions.view(head.region, head.rows_at, asked.rows_bytes)
        route = None
        if head.shared_out:
            if head.shard >= _native.BUCKETS:
                raise TableError(f"Pull of table {head.table!r}: shard {head.shard}")
            route = self.regions.view(head.region, head.shards_at, 2 * _native.BUCKETS)
        taken = asked.table.native.pull_into(
            keys, asked.key_bytes, head.read_only, asked.dtype, rows, route, head.shard
        )
        self.bytes_out += taken * (asked.rows_bytes // max(1, head.count))

    def push(self, request: bytes) -> tuple[bytes, bool]:
        """The reply's bytes, and whether the push was applied now.

        Raises:
            TableError, KeyError, DecodeError, StaleRouteError, ConflictError, OutdatedError:
                nothing was applied.
        """
        head, payload = unpack(pb.PushRequest, request)
        self._find(head)
        if not 1 <= len(head.client) <= MAX_CLIENT_NAME:
            raise TableError(f"Push: client has {len(head.client)} characters; expected 1 to 256")
        message = request
        if head.region:
            message, payload = self._copied(head, payload_size(head))
        self.bytes_in += len(payload)
        push = take_apart(head, payload, message)
        applied = self._state.push(push, now_s())
        return pb.PushReply(applied=applied).SerializeToString(), applied

    def stage(self, request: bytes) -> bytes:
        """Keep a part of a step.

        Raises:
            TableError, KeyError, DecodeError, StaleRouteError, ConflictError: it was not kept.
        """
        head, payload = unpack(pb.StageRequest, request)
        if head.covers:
            raise TableError("Stage: covers is a shard's to say; expected none")
        message = request
        if head.region:
            message, payload = self._copied(head, _part_bytes(head))
        self.bytes_in += len(payload)
        part = take_apart_part(head, payload, message, self._state.buckets)
        stage_part(self._state, part, route=head.route)
        return pb.StageReply().SerializeToString()

    def tally(self, request: bytes) -> bytes:
        """The squared norm of a step.

        Raises:
            TableError, DecodeError, StaleRouteError, ConflictError: it is not known.
        """
        asked = pb.TallyRequest.FromString(request)
        norm = tally_step(self._state, asked)
        return pb.TallyReply(squared_norm=norm).SerializeToString()

    def commit(self, request: bytes) -> tuple[bytes, bool]:
        """The reply's bytes, and whether the step was applied, or dropped, now.

        What follows it is pulled though it was over already: the reply may have been lost.

        Raises:
            TableError, KeyError, DecodeError, StaleRouteError, ConflictError: nothing was applied.
        """
        head, payload = unpack(pb.CommitRequest, request)
        message, part = request, None
        then = pb.PullRequest()
        if head.HasField("then"):  # of which no journal is to know
            then.CopyFrom(head.then)
            head.ClearField("then")
            if not then.region:
                raise TableError("Commit: what follows it names no region; expected one")
            message = pack(head, payload)
        if head.HasField("part"):
            if head.part.covers:
                raise TableError("Commit: covers is a shard's to say; expected none")
            if head.region:
                message, payload = self._copied(head, _part_bytes(head.part))
            self.bytes_in += len(payload)
            part = carried_part(head, payload, message, self._state.buckets)
        elif payload:
            raise TableError("Commit: a payload without a part")
        reply = pb.CommitReply(applied=commit_step(self._state, head, part, message, now_s()))
        if then.region:
            with suppress(TableError, KeyError, StaleRouteError):  # the step is over nevertheless
                self._pull(then, memoryview(b""))
                reply.pulled = True
        return reply.SerializeToString(), reply.applied

    def _copied(
        self, head: pb.PushRequest | pb.StageRequest | pb.CommitRequest, size: int
    ) -> tuple[bytes, memoryview]:
        """A message whose payload is the shard's own, and that payload.

        The client may write to a region at any time: what was checked is what is applied and kept.
        """
        payload = self.regions.view(head.region, head.region_at, size)
        head.region, head.region_at = "", 0
        prefix = payload_prefix(head, size)
        message = b"".join((prefix, payload))
        return message, memoryview(message)[len(prefix) :]

    def _find(self, head: pb.PullRequest | pb.PushRequest) -> Table:
        if head.dim == 0:  # else whatever the table has would do
            raise TableError(f"table {head.table[:140]!r}: the request says dim 0")
        return self._state.find(head.table, head.dim)


def _part_bytes(head: pb.StageRequest) -> int:
    """How many bytes the payload of a part has."""
    return sum(map(payload_size, head.tables))


def payload_size(head: pb.PushRequest | pb.PartOfTable) -> int:
    """How many bytes the payload of a push has, or one table's of a part.

    Raises:
        TableError: a dtype that there is not.
    """
    width = value_bytes(f"Push to table {head.table[:140]!r}", head.dtype)
    row = (head.key_bytes or 8) + head.dim * width + (8 if head.usage else 0)
    return head.count * row
