"""A push as it came over the wire, taken apart and checked."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from ps.engine import _native
from ps.errors import TableError
from ps.shard.journal import Buffer
from ps.table.applied import PushId
from ps.table.checks import value_bytes

_LAST = 1 << 62  # sequences stay below


@dataclass(frozen=True, slots=True)
class ReceivedPush:
    """A push, checked: its message, and where its parts lie.

    Attributes:
        end: last sequence of the push that this message is a part of.
    """

    head: pb.PushRequest
    id: PushId
    end: int
    keys: Buffer
    values: Buffer | NDArray[np.float32]  # float32
    usage: Buffer | None
    message: Buffer  # as it goes to the journal


def take_apart(head: pb.PushRequest, payload: memoryview, message: Buffer) -> ReceivedPush:
    """Where keys, values and usage lie in a push's payload, values as finite float32.

    Raises:
        TableError: sizes that do not fit, or a value that is not finite (names its key).
    """
    key_bytes = head.key_bytes or 8
    if key_bytes not in (4, 8):
        raise TableError(f"Push to table {head.table!r}: key_bytes={key_bytes}; expected 4 or 8")
    width = value_bytes(f"Push to table {head.table!r}", head.dtype)
    if head.kind not in ("", "add", "assign"):
        raise TableError(
            f"Push to table {head.table!r}: kind={head.kind[:40]!r}; expected '', add or assign"
        )
    first, parts = head.first or head.sequence, max(1, head.parts)
    # A message that was split anew keeps its sequence, and its new parts come later.
    if not (head.sequence < first + parts < _LAST and parts <= _native.WINDOW):
        raise TableError(
            f"Push to table {head.table!r}: sequence {head.sequence} of {parts} from {first} on; "
            f"expected none later, all below 2**62, and at most {_native.WINDOW} parts"
        )
    keys_end = head.count * key_bytes
    values_end = keys_end + head.count * head.dim * width
    end = values_end + (8 * head.count if head.usage else 0)
    if end != len(payload):
        raise TableError(
            f"Push to table {head.table!r}: the payload has {len(payload)} bytes; expected {end} "
            f"for {head.count} keys and values of dim {head.dim}"
        )
    keys = payload[:keys_end]
    values: Buffer | NDArray[np.float32] = payload[keys_end:values_end]
    if width == 2:
        values = _native.decode_values(values, head.dtype)
    usage = payload[values_end:] if head.usage else None
    try:
        _native.check_finite(keys, key_bytes, values, head.dim)
        if usage is not None:
            shows = np.frombuffer(usage, np.float32)
            if not (np.isfinite(shows).all() and (shows >= 0).all()):
                raise ValueError("shows and clicks must be finite and not below zero")
        if not (0 <= head.rate <= 1e6):
            raise ValueError(f"rate={head.rate}; expected 0 to 1e6")
    except ValueError as error:
        raise TableError(f"Push to table {head.table!r}: {error}") from None
    push = PushId(head.client, head.epoch, head.sequence)
    return ReceivedPush(head, push, first + parts - 1, keys, values, usage, message)
