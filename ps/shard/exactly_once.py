"""Every push exactly once: what has been applied, what is in flight, what comes again."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from protos import parameter_server_pb2 as pb
from ps.engine import _native
from ps.errors import ConflictError, OutdatedError
from ps.table.applied import AppliedWindow, PushId

FORGET_S = 24 * 3600  # without a push, after which a client is forgotten
LATE_S = FORGET_S // 2  # after which a push that is not known is refused: it might have been
_MOST_CLIENTS = 65_536  # that are remembered, 2 KiB each
_LET_GO = 4_096  # of them at once, where there are more
_SKEW_S = 60  # between the clocks of two hosts
_NEW, _REPEATED, _TOO_OLD = range(3)  # of the engine's window


@dataclass(slots=True)
class _Newest:
    """Of a client: its epoch, where its newest push ends, and when the last one came."""

    epoch: int = 0
    end: int = 0
    heard_s: int = 0


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
        self._newest: dict[str, _Newest] = {}  # by client
        self._positions: dict[str, pb.Position] = {}  # client -> where its reader was
        self._forgotten_s = 0  # when the last of those was heard that are forgotten

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
                self._let_go()
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

    def commit(self, push: PushId, end: int, position: str, time_s: int) -> None:
        """It has been applied.

        Args:
            push: that was begun.
            end: last sequence of the push that it belongs to.
            position: of the client's reader after it, if it says so.
            time_s: Unix time.
        """
        with self._lock:
            self._note(push.client, push.epoch, end, time_s)
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

    def forget(self, time_s: int, client: str = "") -> list[str]:
        """Forget clients that have been silent for `FORGET_S`; their names.

        Their readers' positions stay.

        Args:
            time_s: Unix time.
            client: only this one; all unless given.
        """
        with self._lock:
            asked = [client] if client else list(self._newest)
            names = {
                name
                for name in asked
                if name in self._newest and self._newest[name].heard_s + FORGET_S <= time_s
            }
            names -= {push.client for push in self._in_flight} if names else set()
            if names:
                self._forget(names)
        return sorted(names)

    def may_be_forgotten(self, push: PushId, made_s: int, time_s: int) -> bool:
        """Whether a push that is not known may have been applied all the same.

        Args:
            push: its name.
            made_s: when its client made it, by the client's clock.
            time_s: Unix time.
        """
        with self._lock:
            unknown = push.client not in self._newest and self._forgotten_s > 0
            return abs(time_s - made_s) > LATE_S or (
                unknown and made_s <= self._forgotten_s + _SKEW_S
            )

    @property
    def forgotten_s(self) -> int:
        """Unix time at which the last of those was heard that are forgotten."""
        return self._forgotten_s

    def windows(self) -> list[AppliedWindow]:
        """What has been applied of each client; no push may be in flight."""
        with self._lock:
            newest = {client: replace(n) for client, n in self._newest.items()}
            windows = self._window.export()
            busy = {push.client for push in self._in_flight}
        made = []
        for client, epoch, highest, bits in windows:
            if client not in newest and client not in busy:
                continue  # all that came of it was refused
            n = newest.get(client, _Newest(epoch))
            end = n.end if n.epoch == epoch else 0
            made.append(AppliedWindow(client, epoch, highest, bits, end, n.heard_s))
        return made

    def ends(self) -> list[AppliedWindow]:
        """Where the newest push of each client ends, and nothing else."""
        with self._lock:
            return [
                AppliedWindow(client, n.epoch, end=n.end, heard_s=n.heard_s)
                for client, n in self._newest.items()
                if n.end
            ]

    def merge(self, windows: Iterable[AppliedWindow]) -> None:
        """Add what another shard has applied, or this one in an earlier run."""
        told = list(windows)
        applied = [(w.client, w.epoch, w.highest, w.bits) for w in told if w.bits or w.highest]
        with self._lock:
            self._window.merge(applied)  # refuses bits of another size
            for window in told:  # of one that does not say when, it begins to be silent today
                heard_s = window.heard_s or int(time.time())
                self._note(window.client, window.epoch, window.end, heard_s)
            self._let_go()

    def take_forgotten(self, forgotten_s: int) -> None:
        """What `forgotten_s` was in an earlier run."""
        with self._lock:
            self._forgotten_s = max(self._forgotten_s, forgotten_s)

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

    def _let_go(self) -> None:
        """Where there are too many clients, forget those who have been silent for longest."""
        if len(self._window) <= _MOST_CLIENTS:
            return
        busy = {push.client for push in self._in_flight}
        clients = [window[0] for window in self._window.export() if window[0] not in busy]
        refused = [name for name in clients if name not in self._newest]
        self._forget(set(refused or clients[-_LET_GO:]))  # of those refused nothing was applied

    def _forget(self, names: set[str]) -> None:
        heard = [self._newest[name].heard_s for name in names if name in self._newest]
        # Whose clock had jumped, say, and who is not gone at all, is not taken for new.
        self._forgotten_s = max([self._forgotten_s, *heard])
        kept = _native.Window()
        kept.merge([window for window in self._window.export() if window[0] not in names])
        self._window = kept
        for name in names:
            self._newest.pop(name, None)

    def _note(self, client: str, epoch: int, end: int, heard_s: int) -> None:
        newest = self._newest.setdefault(client, _Newest())
        if end:
            newest.epoch, newest.end = max((newest.epoch, newest.end), (epoch, end))
        newest.heard_s = max(newest.heard_s, heard_s)
