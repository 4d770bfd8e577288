"""A raw gRPC echo of as many bytes as HeterPS moves: the ceiling of anything over gRPC.

Generic handler, with the channel and server options of `protos`. A pull sends 8 bytes for each
distinct key and gets a row of floats for each; a push sends both and gets nothing. Leaves out all
work: no distinct keys are found, no rows looked up, nothing summed, spread or checked. Bytes go in
one message a shard or in pieces of 8 MiB side by side, whichever is faster.
"""

import os
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np

from bench.ps.peers import children
from bench.ps.peers.client import run
from bench.ps.peers.peer import Batch, Peer
from chassis.channels import connect
from chassis.security import TOKEN
from chassis.servers import Server

_SERVICE = "bench.Echo"
_PIECE = 8 << 20
_SIZE = struct.Struct("<q")
_Messages = list[list[bytes]]  # of each shard


@dataclass(slots=True)
class Prepared:
    """Messages of a batch by op and mode."""

    messages: dict[tuple[str, str], _Messages]


class Echo(Peer):
    """One client, as many echoing servers as shards."""

    optimizer: ClassVar[str] = ""

    def start(self) -> Sequence[int]:
        shards = range(self.setting.shards)
        self._servers = [children.start("bench.ps.peers.echo", ["--serve"]) for _ in shards]
        self._channels = [connect(child.wait_ready()) for child in self._servers]
        self._calls: list[Any] = [
            channel.unary_unary(f"/{_SERVICE}/Echo") for channel in self._channels
        ]
        self._pool = ThreadPoolExecutor(4 * self.setting.shards)
        return [child.pid for child in self._servers]

    def versions(self) -> dict[str, str]:
        return {"grpcio": version("grpcio")}

    def fill(self) -> None:
        """Nothing is held."""

    def modes(self, op: str, distinct: bool) -> tuple[str, ...]:
        return ("one message", "pieces")

    def prepare(self, batch: Batch) -> Prepared:
        count = len(np.unique(batch.keys))
        row = 4 * self.setting.dim
        sizes = {"pull": (8, row), "push": (8 + row, 0)}
        messages = {}
        for op, (out, back) in sizes.items():
            for mode in self.modes(op, batch.distinct):
                piece = _PIECE // max(out, back) if mode == "pieces" else count
                messages[op, mode] = [
                    [_message(min(piece, share - i), out, back) for i in range(0, share, piece)]
                    for share in _shares(count, self.setting.shards)
                ]
        return Prepared(messages)

    def pull(self, batch: Prepared, mode: str) -> Any:
        return self._exchange(batch.messages["pull", mode])

    def push(self, batch: Prepared, mode: str) -> None:
        self._exchange(batch.messages["push", mode])

    def _exchange(self, messages: _Messages) -> list[bytes]:
        works = [(call, m) for call, some in zip(self._calls, messages, strict=True) for m in some]
        futures = [self._pool.submit(call, message) for call, message in works[:-1]]
        call, message = works[-1]
        last = call(message)
        return [*(future.result() for future in futures), last]

    def close(self) -> None:
        for child in self._servers:
            child.stop()


def _shares(count: int, shards: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(count), shards)]


def _message(rows: int, out: int, back: int) -> bytes:
    return _SIZE.pack(rows * back) + bytes(rows * out)


def serve() -> None:
    """Answer every message with as many bytes as it asks for."""
    replies: dict[int, bytes] = {}

    def echo(request: bytes, _: object) -> bytes:
        size = _SIZE.unpack_from(request)[0]
        if size not in replies:
            replies[size] = bytes(size)
        return replies[size]

    os.environ.pop(TOKEN, None)  # no role may call an echo
    server = Server("echo")
    server.add(lambda *_: None, None, _SERVICE, {"Echo": echo})
    children.serve(server.start())


if __name__ == "__main__":
    serve() if sys.argv[1] == "--serve" else run(Echo)
