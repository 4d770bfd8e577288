"""How pushes are named, and which of a client's have been applied."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from ps.engine import _native
from ps.table.series import SeriesProgress


class PushId(NamedTuple):
    """Names a message of a push, once and for all.

    Attributes:
        client: who sends it.
        epoch: grows when that client restarts.
        sequence: grows with every message.
    """

    client: str
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class AppliedWindow:
    """What has been applied of a client: the last `WINDOW` sequences are told apart.

    Attributes:
        client: its name.
        epoch: its newest.
        highest: sequence that was heard of.
        bits: of sequence s, bit s % WINDOW; empty where only `end` is told.
        end: last sequence of its newest push; 0: not known.
        heard_s: Unix time of its last push; 0: not known.
    """

    client: str
    epoch: int
    highest: int = 0
    bits: bytes = b""
    end: int = 0
    heard_s: int = 0

    @classmethod
    def of(cls, message: pb.ClientWindow) -> "AppliedWindow":
        """As it came over the wire."""
        m = message
        return cls(m.client, m.epoch, m.highest, m.bits, m.end, m.heard_s)

    @property
    def message(self) -> pb.ClientWindow:
        """As it goes over the wire."""
        return pb.ClientWindow(
            client=self.client,
            epoch=self.epoch,
            highest=self.highest,
            bits=self.bits,
            end=self.end,
            heard_s=self.heard_s,
        )

    def sequences(self) -> NDArray[np.int64]:
        """The applied ones of the last `WINDOW`, in order: int64 [n]."""
        first = max(0, self.highest - _native.WINDOW + 1)
        sequences = np.arange(first, self.highest + 1, dtype=np.int64)
        return sequences[self._flags()[sequences % _native.WINDOW]]

    def including(self, more: Iterable[int]) -> "AppliedWindow":
        """The same as if these sequences had been applied too."""
        width = _native.WINDOW
        sequences = np.fromiter(more, np.int64)
        highest = int(max(self.highest, sequences.max(initial=0)))
        flags = self._flags()
        unheard = np.arange(max(self.highest, highest - width) + 1, highest + 1)
        flags[unheard % width] = False
        flags[sequences[highest - sequences < width] % width] = True
        bits = np.packbits(flags, bitorder="little").tobytes()
        return replace(self, highest=highest, bits=bits)

    def _flags(self) -> NDArray[np.bool_]:
        if not self.bits:
            return np.zeros(_native.WINDOW, np.bool_)
        return np.unpackbits(np.frombuffer(self.bits, np.uint8), bitorder="little").astype(bool)


@dataclass(frozen=True, slots=True)
class Applied:
    """What a shard has applied: pushes of each client, and steps of each series."""

    windows: list[AppliedWindow] = field(default_factory=list)
    series: list[SeriesProgress] = field(default_factory=list)


def pushes_of(messages: Iterable[pb.Pushes]) -> set[PushId]:
    """The pushes that came over the wire by client."""
    return {PushId(m.client, m.epoch, sequence) for m in messages for sequence in m.sequences}


def messages_of(pushes: Iterable[PushId]) -> list[pb.Pushes]:
    """The same for the wire."""
    by_client: dict[tuple[str, int], list[int]] = {}
    for client, epoch, sequence in sorted(pushes):
        by_client.setdefault((client, epoch), []).append(sequence)
    return [
        pb.Pushes(client=client, epoch=epoch, sequences=sequences)
        for (client, epoch), sequences in by_client.items()
    ]
