"""Sums among a stage's workers on several hosts, over the channels of all else: TLS and token.

gloo and NCCL encrypt nothing and ask nobody who they are, so they stay on one host. Rank 0 collects
every worker's part and answers each with the result: for the few workers of a stage a star costs
rank 0's link what a ring would cost everybody's, and the order of every sum is that of the ranks.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor

from chassis.channels import call, connect
from protos import codec, stage_pb2
from workers.errors import PeerLostError

TIMEOUT_S = 300.0
_RETRY_S = 5.0
Array = NDArray[np.generic]


class CombineError(RuntimeError):
    """Workers that do not combine the same."""


@dataclass(frozen=True, slots=True)
class _Combination:
    """What the workers combine, and the parts that are here, by rank."""

    operation: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    parts: dict[int, Array] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} for operation {self.operation}"


class Hub:
    """Rank 0's side: parts until all are there, the last results until nobody can ask again.

    Args:
        size: how many workers the stage has.
        stop: asked while waiting; True gives up.
    """

    def __init__(self, size: int, stop: Callable[[], bool]) -> None:
        self._size = size
        self._stop = stop
        self._changed = threading.Condition()
        self._open: dict[int, _Combination] = {}  # by sequence
        self._results: dict[int, Array] = {}

    def combine(self, sequence: int, rank: int, operation: int, part: Array) -> Array:
        """Bring a part and wait for the result; the same call again gives the same.

        Raises:
            CombineError: the parts do not fit.
            PeerLostError: one is missing after 300 s, or `stop` said so.
        """
        until = time.monotonic() + TIMEOUT_S
        with self._changed:
            if sequence not in self._results:
                self._take(sequence, rank, operation, part)
            while sequence not in self._results:
                if self._stop():
                    raise PeerLostError("stopped")
                if time.monotonic() > until:
                    open_ = self._open.get(sequence)  # none where the result is past already
                    there = sorted(open_.parts) if open_ else []
                    raise PeerLostError(f"only the workers {there} came within {TIMEOUT_S:.0f} s")
                self._changed.wait(0.2)
            return self._results[sequence]

    def _take(self, sequence: int, rank: int, operation: int, part: Array) -> None:
        if not 0 <= rank < self._size:
            raise CombineError(f"rank {rank}: expected 0 to {self._size - 1}")
        given = self._open.setdefault(sequence, _Combination(operation, part.dtype, part.shape))
        if given != (brought := _Combination(operation, part.dtype, part.shape)):
            raise CombineError(
                f"worker {rank} brings {brought}, another {given}; expected the same of all"
            )
        given.parts[rank] = part
        if len(given.parts) == self._size:
            parts = [given.parts[r] for r in range(self._size)]
            self._results[sequence] = _combined(operation, parts)
            del self._open[sequence]
            # All have the result before, or they would not ask for this one.
            self._results.pop(sequence - 2, None)
            self._changed.notify_all()


class Combiner:
    """One worker's side.

    Args:
        rank: of this worker.
        address: of rank 0.
        hub: rank 0's own.
        stop: True ends attempts to reach rank 0.
    """

    def __init__(self, rank: int, address: str, hub: Hub | None, stop: Callable[[], bool]) -> None:
        self._rank = rank
        self._hub = hub
        self._what = f"worker 0 at {address}: combine"
        self._stop = stop
        self._sequence = 0
        self._channel: grpc.Channel | None = None
        if hub is None:
            self._channel = connect(address)
            self._combine: Callable[..., bytes] = self._channel.unary_unary(
                "/heterps.v1.Stage/Combine",
                request_serializer=None,
                response_deserializer=None,
            )

    def sum(self, values: Tensor) -> None:
        """Replace `values` by their sum over the workers."""
        values.copy_(self._run(stage_pb2.SUM, values).view_as(values))

    def first(self, values: Tensor) -> None:
        """Replace `values` by rank 0's."""
        values.copy_(self._run(stage_pb2.FIRST, values).view_as(values))

    def all(self, values: Tensor) -> list[Tensor]:
        """All workers' values, by rank; of the same shape everywhere."""
        found = self._run(stage_pb2.ALL, values)
        return [part.to(values.device) for part in found.view(-1, *values.shape)]

    def meet(self) -> None:
        """Wait for all workers."""
        self._run(stage_pb2.SUM, torch.zeros(1))

    def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()

    def _run(self, operation: int, values: Tensor) -> Tensor:
        array = values.detach().cpu().contiguous().numpy()
        self._sequence += 1
        if self._hub is not None:
            # A copy: the others may still read what this worker is about to overwrite.
            done = self._hub.combine(self._sequence, self._rank, operation, array.copy())
            return torch.from_numpy(np.array(done))
        data = _pack(self._sequence, self._rank, operation, array)
        reply = call(
            self._combine,
            data,
            what=self._what,
            timeout_s=TIMEOUT_S,
            retry_s=_RETRY_S,
            stop=self._stop,
        )
        return torch.from_numpy(np.array(_unpack(reply)[1]))


def serve(hub: Hub, data: bytes, context: grpc.ServicerContext) -> bytes:
    """The raw handler of Combine."""
    try:
        part, array = _unpack(data)
        done = hub.combine(part.sequence, part.rank, part.operation, array)
    except (ValueError, TypeError, DecodeError) as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"bad part: {error}")
    except CombineError as error:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
    except PeerLostError as error:
        context.abort(grpc.StatusCode.CANCELLED, str(error))
    return _pack(part.sequence, part.rank, part.operation, done)


def hosts_of(addresses: "list[str]") -> set[str]:
    """The hosts of host:port texts."""
    return {address.rpartition(":")[0] for address in addresses}


def _combined(operation: int, parts: list[Array]) -> Array:
    if operation == stage_pb2.SUM:
        total = parts[0].copy()
        for part in parts[1:]:
            np.add(total, part, out=total)
        return total
    if operation == stage_pb2.FIRST:
        return parts[0]
    if operation == stage_pb2.ALL:
        return np.stack(parts)
    raise CombineError(f"operation {operation}: expected SUM, FIRST or ALL")


def _pack(sequence: int, rank: int, operation: int, array: Array) -> bytes:
    (spec,), buffers = codec.pack_arrays([("part", array)])
    head = stage_pb2.Part(sequence=sequence, rank=rank, operation=operation, tensor=spec)  # type: ignore[arg-type]
    return codec.pack(head, *buffers)


def _unpack(data: bytes) -> tuple[stage_pb2.Part, Array]:
    part, payload = codec.unpack(stage_pb2.Part, data)
    return part, codec.unpack_arrays([part.tensor], payload)["part"]
