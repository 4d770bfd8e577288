"""What can go wrong with tables, shards and checkpoints."""

import grpc


class TableError(ValueError):
    """A table, keys or gradients that are not what the call needs."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete or damaged; nothing was loaded from it."""


class ShardError(RuntimeError):
    """A shard that did not answer, or refused.

    Attributes:
        shard: its index.
        address: its host:port.
        code: the status that came back.
    """

    def __init__(self, shard: int, address: str, code: grpc.StatusCode, what: str) -> None:
        super().__init__(f"parameter-server shard {shard} ({address}) {what}")
        self.shard = shard
        self.address = address
        self.code = code
