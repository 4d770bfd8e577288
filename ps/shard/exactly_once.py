"""Every push exactly once: what has been applied, what is in flight, what comes again."""

import threading
from collections.abc import Iterable
from enum import Enum

from protos import parameter_server_pb2 as pb
from ps.engine import _native
from ps.errors import ConflictError, OutdatedError
from ps.table.applied import AppliedWindow, PushId

_NEW, _REPEATED, _TOO_OLD = range(3)  # of the engine's window


class Seen(Enum):
    """What has been seen of a push that comes."""

    NEW = "new"
    IN_FLIGHT = "in flight"
    APPLIED = "applied"


class ExactlyOnce:
    """Which pushes a shard has applied; thread-safe.

    Whoever applies a push calls `begin` before and `commit`, or `abort`, after. Whoever brings it
    again meanwhile waits for that, since it may still fail.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._window = _native.Window()
        self._in_flight: dict[PushId, threading.Event] = {}
        self._ends: dict[str, tuple[int, int]] = {}  # client -> epoch, end of its newest push
        self._positions: dict[str, pb.Position] = {}  # client -> where its reader was

    def begin(self, push: PushId) -> Seen:
        """Begin a push, if it is new; `commit` or `abort` must follow then.

        Raises:
            OutdatedError: it is too late to tell.
            ConflictError: its client has begun a later epoch.
        """
        with self._lock:
            mark = self._window.mark(*push)
            if mark == _NEW:
                self._in_flight[push] = threading.Event()
                return Seen.NEW
            if mark == _REPEATED:
                return Seen.IN_FLIGHT if push in self._in_flight else Seen.APPLIED
        text = f"client {push.client!r} epoch {push.epoch} sequence {push.sequence}"
        if mark == _TOO_OLD:
            raise OutdatedError(
                f"Push of {text}: more than {_native.WINDOW} pushes behind its newest, so whether "
                "it was applied is no longer known; it was not applied now"
            )
        raise ConflictError(
            f"Push of {text}: a later epoch of this client has pushed since; two clients must not "
            "share a client_id"
        )

    def look(self, push: PushId) -> Seen:
        """As `begin`, but begins nothing."""
        seen = self.begin(push)
        if seen is Seen.NEW:
            self.abort(push)
        return seen

    def commit(self, push: PushId, end: int, position: str) -> None:
        """It has been applied.

        Args:
            push: that was begun.
            end: last sequence of the push that it belongs to.
            position: of the client's reader after it, if it says so.
        """
        with self._lock:
            self._note_end(push.client, push.epoch, end)
            if position:
                latest = self._positions.get(push.client)
                if latest is None or (latest.epoch, latest.sequence) < push[1:]:
                    self._positions[push.client] = pb.Position(
                        client=push.client,
                        epoch=push.epoch,
                        sequence=push.sequence,
                        position=position,
                    )
            self._in_flight.pop(push).set()

    def abort(self, push: PushId) -> None:
        """It has not been applied: when it comes again, it is new."""
        with self._lock:
            self._window.unmark(*push)
            self._in_flight.pop(push).set()

    def wait(self, push: PushId) -> None:
        """Until it is not in flight."""
        with self._lock:
            finished = self._in_flight.get(push)
        if finished is not None:
            finished.wait()

    def windows(self) -> list[AppliedWindow]:
        """What has been applied of each client; no push may be in flight."""
        with self._lock:
            ends = dict(self._ends)
            windows = self._window.export()
        made = []
        for client, epoch, highest, bits in windows:
            ended, end = ends.get(client, (epoch, 0))
            made.append(AppliedWindow(client, epoch, highest, bits, end if ended == epoch else 0))
        return made

    def ends(self) -> list[AppliedWindow]:
        """Where the newest push of each client ends, and nothing else."""
        with self._lock:
            return [AppliedWindow(c, epoch, end=end) for c, (epoch, end) in self._ends.items()]

    def merge(self, windows: Iterable[AppliedWindow]) -> None:
        """Add what another shard has applied, or this one in an earlier run."""
        told = list(windows)
        applied = [(w.client, w.epoch, w.highest, w.bits) for w in told if w.bits or w.highest]
        with self._lock:
            self._window.merge(applied)  # refuses bits of another size
            for window in told:
                if window.end:
                    self._note_end(window.client, window.epoch, window.end)

    def positions(self) -> list[pb.Position]:
        """Where the readers of clients were at their newest pushes that say so."""
        with self._lock:
            return list(self._positions.values())

    def take_positions(self, positions: Iterable[pb.Position]) -> None:
        """Positions from a checkpoint, or another shard."""
        with self._lock:
            for position in positions:
                self._positions[position.client] = pb.Position.FromString(
                    position.SerializeToString()
                )

    def _note_end(self, client: str, epoch: int, end: int) -> None:
        self._ends[client] = max(self._ends.get(client, (0, 0)), (epoch, end))
