"""The table engine and the client's batch operations, in C++. Buffers must be C-contiguous."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Buffer = bytes | bytearray | memoryview | NDArray[Any]

BUCKETS: int
WINDOW: int

class Window:
    """Which (client, epoch, sequence) have been applied."""

    def __init__(self) -> None: ...
    def export(self) -> list[tuple[str, int, int, bytes]]: ...
    def restore(self, clients: list[tuple[str, int, int, bytes]]) -> None: ...

class Table:
    """Rows by key. `keys` are uint64, `grads` float32 [n, dim]."""

    def __init__(
        self,
        dim: int,
        optimizer: str,
        learning_rate: float,
        epsilon: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        initial_accumulator: float,
        initializer: str,
        scale: float,
        seed: int,
    ) -> None: ...
    def pull(self, keys: _Buffer, read_only: bool) -> NDArray[np.float32]: ...
    def pull_message(self, prefix: _Buffer, keys: _Buffer, read_only: bool) -> bytes: ...
    def push(self, keys: _Buffer, grads: _Buffer) -> None: ...
    def push_once(
        self,
        window: Window,
        client: str,
        epoch: int,
        sequence: int,
        keys: _Buffer,
        grads: _Buffer,
    ) -> int:
        """0 applied, 1 repeated, 2 too old to tell, 3 of an earlier epoch."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def save(self, path: str, spec: bytes) -> int: ...
    def load(self, path: str, shard: int, shards: int) -> int: ...
    def keys(self) -> NDArray[np.uint64]: ...
    @property
    def dim(self) -> int: ...
    @property
    def state_width(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def pulled(self) -> int: ...
    @property
    def pushed(self) -> int: ...

def unique(keys: _Buffer) -> tuple[NDArray[np.uint64], NDArray[np.int64]]: ...
def partition(
    keys: _Buffer, shards: int
) -> list[tuple[NDArray[np.uint64], NDArray[np.int64]]]: ...
def gather(
    parts: Sequence[tuple[_Buffer, _Buffer]], distinct: int, inverse: _Buffer | None, dim: int
) -> NDArray[np.float32]: ...
def segment_sum(
    inverse: _Buffer, grads: _Buffer, segments: int, dim: int
) -> NDArray[np.float32]: ...
def push_message(
    prefix: _Buffer, keys: _Buffer, grads: _Buffer, positions: _Buffer, dim: int
) -> bytes: ...
def check_finite(keys: _Buffer, grads: _Buffer, dim: int) -> None: ...
