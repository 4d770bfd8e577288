"""What shards reply to pulls, checked."""

from google.protobuf.message import DecodeError

from protos import parameter_server_pb2 as pb
from protos.codec import unpack
from ps.client.session import Shard


def rows_of(shard: Shard, reply: bytes, asked: pb.PullRequest, size: int) -> memoryview:
    """The payload of a reply, which has to have `size` bytes.

    Raises:
        RuntimeError: it is no reply to what was asked.
    """
    try:
        head, payload = unpack(pb.PullReply, reply)
        if (head.dim, head.count, len(payload)) != (asked.dim, asked.count, size):
            raise ValueError(
                f"{head.count} rows of dim {head.dim} in {len(payload)} bytes; expected "
                f"{asked.count} of {asked.dim} in {size}"
            )
    except (DecodeError, ValueError) as error:
        raise RuntimeError(
            f"parameter-server shard {shard.index} ({shard.address}) sent a malformed "
            f"reply to Pull of {asked.table!r}: {error}"
        ) from None
    return payload
