"""A turn at all shards, during which nobody else saves, folds, loads or moves rows there.

In it pushes may be held back, for a cut. Shards believe a holder for a few seconds, and no longer
than its connection lasts; a thread says again and again that it lives. So when it dies others go
on at once, and when it is stopped, or cut off, seconds later.
"""

import threading
import time
from contextlib import suppress
from functools import partial
from types import TracebackType
from uuid import uuid4

import numpy as np

from protos import parameter_server_pb2 as pb
from protos.reason_pb2 import HOLD_ENDED
from ps.client.session import Routes, Session, Shard
from ps.engine import _native
from ps.errors import CheckpointError, HoldEndedError, ShardError, StaleRouteError
from ps.table.applied import AppliedWindow, PushId, messages_of

_HOLD_S = 3.0
_RENEW_S = 0.5
_LONGEST_S = 15.0  # for which pushes are held back, however alive the holder is
_PATIENCE_S = 2.0  # for pushes that are applied in part; a client that died will not finish them


class Hold:
    """A turn at all shards of one routing; ends with the `with` block.

    Args:
        session: the connections.
        limit: when, by `time.monotonic`, to stop waiting.

    Attributes:
        cut: its name.
        routes: the routing of its shards.

    Raises:
        CheckpointError: others kept the shards busy for too long.
        ShardError: a shard did not answer.
    """

    def __init__(self, session: Session, limit: float) -> None:
        self.cut = uuid4().hex
        self.routes: Routes = session.routes
        self._session = session
        self._held_since: float | None = None
        self._ended = threading.Event()
        # Under way; forgotten, one would be cancelled.
        self._calls: list[object] = []
        self._kept: dict[str, object] = {}  # by the shard's address, for as long as its turn
        self._thread = threading.Thread(target=self._renew, name="hold", daemon=True)
        self._thread.start()
        try:
            self._reserve(limit)
        except BaseException:
            self.abandon()
            raise

    @property
    def shards(self) -> list[Shard]:
        """Those of its routing, in order."""
        return self._session.shards_of(self.routes)

    def hold_pushes(self) -> set[PushId]:
        """Hold pushes back on all shards, but have those finished that one of them has applied.

        Returns:
            What was not finished in time: its sender is gone.

        Raises:
            StaleRouteError: shards go by different routings, or another one than `routes`.
            HoldEndedError: a shard was too slow, or the holder was.
        """
        self._held_since = time.monotonic()
        admitted: set[PushId] = set()
        limit = time.monotonic() + _PATIENCE_S
        while True:
            request = pb.CutRequest(id=self.cut, hold_s=_HOLD_S, admit=messages_of(admitted))
            replies: list[pb.CutReply] = self._session.run_on_new_threads(
                [partial(_cut, shard, request) for shard in self.shards]
            )
            if any(reply.busy for reply in replies):
                raise HoldEndedError("a shard was too slow to be cut; try again")
            if any(reply.route != self.routes.version for reply in replies):
                raise StaleRouteError("shards go by different routings")
            missing = _unfinished(replies)
            if not missing or time.monotonic() > limit:
                return missing
            if admitted:
                time.sleep(0.005)
            admitted = missing

    def abandon(self) -> None:
        """Let pushes and others go on, where shards have not done so by themselves."""
        self._ended.set()
        self._thread.join()
        for shard in self.shards:
            try:
                request = pb.CutRequest(id=self.cut, abandon=True)
                shard.call(shard.stub.Cut, request, "Cut", 2.0, 0.0)
            except ShardError:
                continue  # it ends by itself

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:  # what the turn was for has ended it on every shard
            self._ended.set()
            self._thread.join()
        else:
            self.abandon()

    def _reserve(self, limit: float) -> None:
        """Wait for our turn on all shards. The first comes first, so that two do not cross."""
        request = pb.CutRequest(id=self.cut)
        while True:
            for shard in self.shards:
                if _cut(shard, request).busy:
                    break
                if shard.address not in self._kept:
                    with suppress(ValueError):  # aborted just now, as the next call finds
                        self._kept[shard.address] = shard.stub.Keep.future(request)
            else:
                return
            if time.monotonic() > limit:
                raise CheckpointError(
                    f"shard {shard.index} ({shard.address}) is busy with another save; try again "
                    "later"
                )

    def _renew(self) -> None:
        request = pb.CutRequest(id=self.cut, hold_s=_HOLD_S, renew=True)
        while not self._ended.wait(_RENEW_S):
            held = self._held_since
            if held is not None and time.monotonic() - held > _LONGEST_S:
                return
            # Whoever does not answer lets go by itself, and must not keep the others from it.
            try:
                self._calls = [s.stub.Cut.future(request, timeout=_HOLD_S) for s in self.shards]
            except ValueError:  # the channels are closed: the client was aborted
                return


def _cut(shard: Shard, request: pb.CutRequest) -> pb.CutReply:
    """A shard's answer.

    Raises:
        HoldEndedError: the turn was over before.
        ShardError: no answer, or a refusal.
    """
    try:
        reply: pb.CutReply = shard.call(shard.stub.Cut, request, "Cut")
    except ShardError as error:
        if error.reason == HOLD_ENDED:
            raise HoldEndedError(str(error)) from None
        raise
    return reply


def _unfinished(replies: list[pb.CutReply]) -> set[PushId]:
    """Pushes that no shard has applied, though later ones, or other parts of theirs, were."""
    seen: dict[str, list[AppliedWindow]] = {}
    for reply in replies:
        for message in reply.clients:
            seen.setdefault(message.client, []).append(AppliedWindow.of(message))
    missing: set[PushId] = set()
    for client, told in seen.items():
        epoch = max(window.epoch for window in told)  # it has begun anew since all before
        windows = [window for window in told if window.epoch == epoch]
        end = max(window.end for window in windows)
        highest = max(window.highest for window in windows)
        first = max(1, highest - _native.WINDOW + 1)
        # Where no end is known, nobody has heard it since the shards were started.
        expected = np.arange(first, end + 1)
        applied = np.concatenate([window.sequences() for window in windows])
        gaps = np.setdiff1d(expected, applied)
        missing.update(PushId(client, epoch, sequence) for sequence in gaps.tolist())
    return missing | _unfinished_steps(replies)


def _unfinished_steps(replies: list[pb.CutReply]) -> set[PushId]:
    """Steps that one shard has committed, or dropped, and another has not."""
    told = [{state.series: state.open_from[0] for state in reply.series} for reply in replies]
    missing = set()
    for series in set().union(*told):
        each = [states.get(series, 0) for states in told]
        if min(each) < max(each):
            missing.add(PushId(series, 0, max(each) - 1))
    return missing
