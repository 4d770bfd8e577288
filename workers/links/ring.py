"""A stage's workers in a ring: each sends to the next rank, and sums go round it twice.

The first way round adds up: rank 0 sends its values, each rank adds its own to what came, and the
last has the sum; the second takes it to all. Values travel in segments, so that all links are in
use at once. Every element is thus ((x0 + x1) + x2) + ... in the order of ranks, in its own dtype,
however values are grouped. Where a worker goes away its connections close, the next one closes its
own, and so on: all know within the time that a byte takes to go round.
"""

import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from chassis.hang_up import hang_up
from workers.errors import PeerLostError
from workers.links.inbox import Stopped
from workers.links.reader import Reader
from workers.links.writer import Writer

SEGMENT = 1 << 19  # bytes
SILENCE_S = 30  # after which a worker that keeps its connection open counts as gone
_ALIVE_S = 1.0  # between signs of life of a worker that has nothing to send
_CLOSE_S = 5.0
SECTIONS = 3  # dtypes of a bucket, at most
_PART, _SUM, _ALIVE, _LEAVE = range(4)
# Kind, whether this is the series' last bucket; series, bucket, place and length; then dtype and
# bytes of each section.
_HEAD = struct.Struct("!BBqIQI" + SECTIONS * "BQ")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


class SumError(RuntimeError):
    """Workers that do not sum the same."""


@dataclass(frozen=True, slots=True)
class BucketId:
    """Which values: `number` counts those of a series, the sums of a step, say."""

    series: int
    number: int


@dataclass(frozen=True, slots=True)
class Section:
    """So many bytes of a bucket that are values of one dtype."""

    dtype: torch.dtype
    size: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{self.size // self.dtype.itemsize}]"


@dataclass(frozen=True, slots=True)
class _Shape:
    """What must be the same of a bucket on all workers."""

    sections: tuple[Section, ...]
    last: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(section.size for section in self.sections)

    def segments(self) -> range:
        """Where each segment begins."""
        return range(0, max(1, self.size), SEGMENT)

    def length(self, offset: int) -> int:
        """Bytes of the segment that begins there."""
        return min(SEGMENT, self.size - offset)

    def add(self, came: Tensor, own: Tensor, into: Tensor, offset: int) -> None:
        """Add two parts of buckets, [n] bytes from `offset` on."""
        first = -offset
        for section in self.sections:
            at, end = max(0, first), min(len(own), first + section.size)
            if at < end:
                x, y, sum_ = (part[at:end].view(section.dtype) for part in (came, own, into))
                torch.add(x, y, out=sum_)
            first += section.size

    def __str__(self) -> str:
        return " and ".join(map(str, self.sections)) + (" at the end" if self.last else "")


@dataclass(slots=True, eq=False)
class Bucket:
    """Values that are being summed in place: their bytes, contiguous, on the host.

    Attributes:
        missing: where the segments begin whose sum is not here.
        sending: segments that are sent out of the values' memory.
    """

    id: BucketId
    bytes: Tensor
    shape: _Shape
    missing: set[int] = field(init=False)
    sending: int = 0

    def __post_init__(self) -> None:
        self.missing = set(self.shape.segments())

    def part(self, offset: int) -> Tensor:
        """The bytes of a segment."""
        return self.bytes[offset : offset + self.shape.length(offset)]


@dataclass(frozen=True, slots=True)
class _Message:
    """What goes to the next rank: a segment, or a word without one.

    Attributes:
        of: the bucket in whose memory the payload lies.
        buffer: of ours in which it lies.
    """

    kind: int
    id: BucketId
    shape: _Shape
    offset: int
    payload: Tensor  # bytes
    of: Bucket | None = None
    buffer: Tensor | None = None

    def head(self) -> bytes:
        sections = [(_DTYPES.index(s.dtype), s.size) for s in self.shape.sections]
        sections += [(len(_DTYPES), 0)] * (SECTIONS - len(sections))
        return _HEAD.pack(
            *(self.kind, self.shape.last, self.id.series, self.id.number),
            *(self.offset, len(self.payload), *chain.from_iterable(sections)),
        )


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _word(kind: int, rank: int = 0) -> _Message:
    return _Message(kind, BucketId(0, rank), _Shape((), False), 0, _NOTHING)


class Ring:
    """One worker's place in the ring.

    Attributes:
        on_loss: called once when a worker is gone, by a thread of the ring's.

    Args:
        before: the connection on which the rank before sends.
        after: the connection to the next rank.
        stop: True gives up waiting.
        silence_s: seconds without a sign of life after which the rank before counts as gone.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        before: socket.socket,
        after: socket.socket,
        stop: Callable[[], bool],
        silence_s: int = SILENCE_S,
    ) -> None:
        self.rank = rank
        self.size = size
        self.on_loss: Callable[[], object] | None = None
        self._before = before
        self._after = after
        self._stop = stop
        self._changed = threading.Condition()
        self._open: dict[BucketId, Bucket] = {}
        self._early: dict[BucketId, list[_Message]] = {}  # parts that came before our own values
        self._left: int | None = None  # a rank that said goodbye
        self._lost: Exception | None = None
        self._closing = False
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        after.setblocking(True)
        self._reader = Reader(before, silence_s)
        self._writer = Writer(
            *(after, "ring sends", self._send_failed),
            alive=_word(_ALIVE).head(),
            alive_s=_ALIVE_S,
        )
        self._receiver = threading.Thread(target=self._receive, name="ring receives", daemon=True)
        self._receiver.start()

    @torch.inference_mode()
    def begin(
        self, id_: BucketId, values: Tensor, sections: Sequence[Section], *, last: bool
    ) -> Bucket:
        """Begin to replace values by their sum; leave them alone until `wait` has returned.

        All workers begin the same buckets, in an order of their own.

        Args:
            values: their bytes, uint8 [n].
            sections: what they are, at most `SECTIONS`, none of larger items than one before it.
            last: no bucket of the series follows.

        Raises:
            PeerLostError: a worker is gone.
            SumError: another brings values of another number or dtype under this id.
        """
        for section in sections:
            if section.dtype not in _DTYPES:
                names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
                raise SumError(f"{section.dtype} cannot be summed; expected one of {names}")
        shape = _Shape(tuple(sections), last)
        bucket = Bucket(id_, values, shape)
        with self._changed:
            self._check()
            if self._left is not None:
                raise PeerLostError(f"worker {self._left} of the stage has left")
            self._open[id_] = bucket
            early = self._early.pop(id_, [])
        if self.rank == 0:
            for offset in shape.segments():
                self._pass_on(_PART, bucket, offset)
        for message in early:
            self._add(bucket, message)
        return bucket

    def wait(self, bucket: Bucket) -> None:
        """Return once a bucket's values are the sum, and the caller's again.

        Raises:
            PeerLostError, SumError
            Stopped: this process was asked to end.
        """
        with self._changed:
            while bucket.missing or bucket.sending:
                self._check()
                if self._stop():
                    raise Stopped("stopped")
                self._changed.wait(0.2)

    def check(self) -> None:
        """Raise what is known to be wrong: nobody has to wait for a sum to hear of it.

        Raises:
            PeerLostError, SumError
        """
        with self._changed:
            self._check()

    def close(self) -> None:
        """Say goodbye once all is sent that others need; safe to repeat."""
        with self._changed:
            already, self._closing = self._closing, True
        if already:
            return
        self._send(_word(_LEAVE, self.rank))
        self._writer.close(_CLOSE_S)
        self._hang_up()
        self._receiver.join(_CLOSE_S)
        self._before.close()
        self._after.close()

    def _check(self) -> None:
        if isinstance(self._lost, SumError):
            raise SumError(str(self._lost))
        if self._lost is not None:
            raise PeerLostError(str(self._lost)) from self._lost
        if self._closing:
            raise PeerLostError("this worker has left its stage's ring")

    def _lose(self, error: Exception) -> None:
        """Give up: whoever waits is told, and by the closed connections all other workers."""
        with self._changed:
            first = self._lost is None and not self._closing
            if first:
                self._lost = error
            self._changed.notify_all()
        self._writer.close()
        self._hang_up()
        if first and self.on_loss is not None:
            self.on_loss()

    def _hang_up(self) -> None:
        for connection in (self._before, self._after):
            hang_up(connection)

    def _pass_on(self, kind: int, bucket: Bucket, offset: int) -> None:
        """Send a segment out of a bucket's own memory."""
        with self._changed:
            bucket.sending += 1
        payload = bucket.part(offset)
        self._send(_Message(kind, bucket.id, bucket.shape, offset, payload, bucket))

    def _have(self, bucket: Bucket, offset: int) -> None:
        """Note that one more segment is the sum."""
        with self._changed:
            bucket.missing.remove(offset)
            self._settle(bucket)

    def _settle(self, bucket: Bucket) -> None:
        if not bucket.missing and not bucket.sending:
            self._open.pop(bucket.id, None)
            self._changed.notify_all()

    def _add(self, bucket: Bucket, message: _Message) -> None:
        """Add our own values to a part that came, and send it on."""
        if message.shape != bucket.shape:
            raise self._refused(
                bucket,
                f"brings {bucket.shape}, those before it {message.shape}; expected the same of all",
            )
        own, came = bucket.part(message.offset), message.payload
        if self.rank == self.size - 1:
            if message.offset not in bucket.missing:
                raise self._refused(bucket, f"is sent the part at {message.offset} twice")
            bucket.shape.add(came, own, own, message.offset)
            self._release(message)
            self._pass_on(_SUM, bucket, message.offset)
            self._have(bucket, message.offset)
        else:
            bucket.shape.add(came, own, came, message.offset)
            self._send(message)

    def _refused(self, bucket: Bucket, why: str) -> SumError:
        error = SumError(f"sum {bucket.id.number} of {bucket.id.series}: worker {self.rank} {why}")
        self._lose(error)
        return error

    def _buffer(self) -> Tensor:
        try:
            return self._buffers.get_nowait()
        except queue.Empty:
            return torch.empty(SEGMENT, dtype=torch.uint8)

    def _release(self, message: _Message) -> None:
        if message.buffer is not None:
            self._buffers.put(message.buffer)

    @torch.inference_mode()
    def _receive(self) -> None:
        """The thread that takes what the rank before sends."""
        head = bytearray(_HEAD.size)
        try:
            while True:
                self._reader.fill(memoryview(head))
                kind, last, series, number, offset, length, *rest = _HEAD.unpack(head)
                if kind == _LEAVE:
                    self._take_leave(number)
                    if number == (self.rank - 1) % self.size:
                        return
                elif kind in (_PART, _SUM):
                    pairs = zip(rest[::2], rest[1::2], strict=True)
                    sections = [Section(_DTYPES[d], s) for d, s in pairs if d < len(_DTYPES)]
                    shape = _Shape(tuple(sections), bool(last))
                    self._take(kind, BucketId(series, number), shape, offset, length)
                elif kind != _ALIVE:
                    raise ConnectionError(f"a message of kind {kind}")
        except SumError:
            pass  # told to the others and to whoever waits
        except (OSError, ValueError, IndexError, RuntimeError) as error:
            before = (self.rank - 1) % self.size
            self._lose(PeerLostError(f"worker {before} of the stage: {error}"))

    def _take_leave(self, rank: int) -> None:
        """A rank has left: what is open now it will bring nothing to any more."""
        with self._changed:
            self._left = rank
            doomed = any(bucket.missing for bucket in self._open.values())
        if doomed:
            self._lose(PeerLostError(f"worker {rank} of the stage has left"))
        elif rank != (self.rank + 1) % self.size:
            self._send(_word(_LEAVE, rank))

    def _take(
        self,
        kind: int,
        id_: BucketId,
        shape: _Shape,
        offset: int,
        length: int,
    ) -> None:
        """Receive a segment.

        Raises:
            ConnectionError: it is none of what the rank before has to send.
        """
        if offset not in shape.segments() or length != shape.length(offset):
            raise ConnectionError(
                f"{length} bytes at {offset} of {shape}; expected a segment of {SEGMENT} bytes, "
                "or what is left"
            )
        if (kind, self.rank) in ((_PART, 0), (_SUM, self.size - 1)):  # who makes the first of them
            raise ConnectionError(f"a segment of kind {kind}")
        bucket = self._open.get(id_)
        if kind == _SUM:
            if bucket is None or bucket.shape != shape or offset not in bucket.missing:
                raise ConnectionError(f"a sum that nobody asked for: {id_}, at {offset}")
            self._reader.fill(_memory(bucket.part(offset)))
            if self.rank != self.size - 2:  # the way ends before the rank that made it
                self._pass_on(_SUM, bucket, offset)
            self._have(bucket, offset)
            return
        buffer = self._buffer()
        payload = buffer[:length]
        self._reader.fill(_memory(payload))
        message = _Message(_PART, id_, shape, offset, payload, buffer=buffer)
        with self._changed:
            bucket = self._open.get(id_)
            if bucket is None:
                self._early.setdefault(id_, []).append(message)
                return
        self._add(bucket, message)

    def _send(self, message: _Message) -> None:
        """Send to the next rank."""
        self._writer.send(
            message.head(),
            _memory(message.payload),
            lambda: self._sent(message),
            # A word may come too late for one that left; if it died, the ring tells.
            needed=message.kind in (_PART, _SUM),
        )

    def _sent(self, message: _Message) -> None:
        if message.of is None:
            self._release(message)
            return
        with self._changed:
            message.of.sending -= 1
            self._settle(message.of)

    def _send_failed(self, error: OSError) -> None:
        after = (self.rank + 1) % self.size
        self._lose(PeerLostError(f"worker {after} of the stage: {error}"))


def _memory(values: Tensor) -> memoryview:
    return values.numpy().data
