"""The table engine and the client's batch operations, in C++. Buffers must be C-contiguous."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Buffer = bytes | bytearray | memoryview | NDArray[Any]
_Client = tuple[str, int, int, bytes]

BUCKETS: int
WINDOW: int

class Window:
    """Which (client, epoch, sequence) have been applied."""

    def __init__(self) -> None: ...
    def mark(self, client: str, epoch: int, sequence: int) -> int:
        """0 new, and now marked; 1 repeated; 2 too old to tell; 3 of an earlier epoch."""

    def unmark(self, client: str, epoch: int, sequence: int) -> None: ...
    def __len__(self) -> int: ...
    def export(self) -> list[_Client]:
        """Its clients, the most recently heard first."""

    def merge(self, clients: list[_Client]) -> None: ...

class ForgottenError(ValueError):
    """A table has evicted more rows since a save than it can name."""

class DiskFullError(RuntimeError):
    """Rows beyond a table's memory find no room on the disk; nothing was changed."""

class BrokenError(RuntimeError):
    """A change of a table began and could not be finished: the table is no longer whole."""

class Snapshot:
    """Rows as they were at a cut, in blocks, while the table goes on changing."""

    @property
    def cut(self) -> int: ...
    def next(self) -> bytes | None: ...
    def close(self) -> None: ...

class Table:
    """Rows by key. `keys` are unsigned, of 8 or 4 bytes; `values` float32 [n, dim]."""

    def __init__(
        self,
        segments: list[dict[str, Any]],
        dtype: str,
        stochastic: bool,
        admission: dict[str, Any],
        score: dict[str, Any],
        eviction: dict[str, Any],
        memory_bytes: int,
        directory: str,
    ) -> None: ...
    def pull(self, keys: _Buffer, read_only: bool) -> NDArray[np.float32]: ...
    def pull_message(
        self, prefix: _Buffer, keys: _Buffer, key_bytes: int, read_only: bool, dtype: str
    ) -> bytes: ...
    def pull_into(
        self,
        keys: _Buffer,
        key_bytes: int,
        read_only: bool,
        dtype: str,
        out: _Buffer,
        route: _Buffer | None = None,
        shard: int = 0,
    ) -> int: ...
    def prefetch(self, keys: _Buffer, key_bytes: int) -> None: ...
    def push(
        self,
        keys: _Buffer,
        key_bytes: int,
        values: _Buffer,
        kind: str,
        rate: float,
        nonce: int,
        time_s: int,
        step: int,
        usage: _Buffer | None,
        distinct: bool = False,
        turn: int = 0,
        shrink: _Buffer | None = None,
    ) -> None:
        """Raises DiskFullError, unless it has a turn, and BrokenError.

        Args:
            turn: of `take_turn`; each row sees pushes that have one in the order of these.
            shrink: bool [1024], of which buckets the rows are then held to the eviction rules, but
                `max_rows`, their scores decayed.
        """

    def take_turn(self) -> int:
        """A place in the order of pushes. A push with it must follow, since later ones wait."""

    def check_room(self) -> None:
        """Raises DiskFullError while memory is over its limit and rows cannot go to disk."""
    def snapshot(
        self, since: int, values: bool, min_score: float, buckets: _Buffer | None
    ) -> Snapshot:
        """Rows changed after the cut `since`, or all of them where it is 0.

        Raises:
            ForgottenError: rows evicted since then can no longer be named.
            RuntimeError: the table is being saved already.
        """
    def absorb(
        self, block: _Buffer, wanted: _Buffer | None, source: "Table | None" = None
    ) -> int:
        """Take the rows of a block whose buckets are wanted; how many.

        Args:
            source: made as the table that the block was written of, of the same `dim`: rows begin
                anew with its weights, and its usage and counts where both tables keep any.
        """

    def erase(self, buckets: _Buffer) -> None: ...
    def shrink(self, time_s: int, step: int, decay: bool) -> int: ...
    def demote(self) -> None: ...
    def keys(self, limit: int) -> NDArray[np.uint64]: ...
    def counters(self) -> dict[str, int]: ...
    @property
    def dim(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def tracks_usage(self) -> bool: ...

def unique(keys: _Buffer) -> tuple[NDArray[np.uint64], NDArray[np.int64]]: ...
def partition(
    keys: _Buffer, route: NDArray[np.uint16], shards: int
) -> list[tuple[NDArray[np.uint64], NDArray[np.int64]]]: ...
def plan(
    keys: _Buffer, route: NDArray[np.uint16], shards: int
) -> tuple[NDArray[np.uint64], list[int], NDArray[np.int64]]:
    """Distinct keys by shard; where each shard's begin, and the end; keys[inverse] are the given."""

def gather(
    parts: Sequence[tuple[_Buffer, _Buffer | None]],
    distinct: int,
    inverse: _Buffer | None,
    dim: int,
    dtype: str,
) -> NDArray[np.float32]: ...
def segment_sum(
    inverse: _Buffer, grads: _Buffer, segments: int, dim: int
) -> NDArray[np.float32]: ...
def pool(
    rows: _Buffer,
    inverse: _Buffer,
    there: _Buffer | None,
    length: int,
    dim: int,
    pooling: str,
) -> tuple[NDArray[np.float32], NDArray[np.int32] | None]:
    """Bags [n, dim] of `length` keys each; of a maximum the rows that they are of, too, -1: none."""

def pool_grads(
    grads: _Buffer,
    inverse: _Buffer,
    there: _Buffer | None,
    picked: _Buffer | None,
    length: int,
    rows: int,
    dim: int,
    pooling: str,
) -> NDArray[np.float32]:
    """The gradient [rows, dim] of the rows, of the bags' gradients [n, dim]."""

def push_message(
    prefix: _Buffer,
    keys: _Buffer,
    values: _Buffer,
    positions: _Buffer,
    dim: int,
    dtype: str,
    key_bytes: int,
    usage: _Buffer | None,
) -> bytes: ...
def push_into(
    out: _Buffer,
    keys: _Buffer,
    values: _Buffer,
    positions: _Buffer,
    dim: int,
    dtype: str,
    key_bytes: int,
    usage: _Buffer | None,
) -> None: ...
def merge(
    parts: Sequence[tuple[_Buffer, int, _Buffer]], dim: int
) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    """Distinct keys and the sums of their rows, in the order of the parts.

    Args:
        parts: keys, the bytes of one, and float32 rows.
        dim: of a row.
    """

def squared_norm(values: _Buffer) -> float:
    """Of float32, summed in float64; not finite where one of them is not."""

def scaled(values: _Buffer, scale: float) -> NDArray[np.float32]: ...
def narrow_keys(keys: _Buffer) -> bytes: ...
def check_finite(keys: _Buffer, key_bytes: int, grads: _Buffer, dim: int) -> None: ...
def decode_values(values: _Buffer, dtype: str) -> NDArray[np.float32]: ...
def decode_block(
    block: _Buffer, dim: int
) -> tuple[bool, NDArray[np.uint64], NDArray[np.float32]]:
    """Whether it names removed keys, the keys, and their float32 rows."""

def buckets_of(keys: _Buffer) -> NDArray[np.uint16]: ...
