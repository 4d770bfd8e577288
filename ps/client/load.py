"""A load onto all shards: each reads its rows beside its tables, then all put them in use."""

import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import grpc

from protos import parameter_server_pb2 as pb
from protos.reason_pb2 import HOLD_ENDED, SAVE_REPLACED
from ps.checkpoint import manifest
from ps.checkpoint.places import open_store
from ps.checkpoint.store import Store
from ps.checkpoint.tables import Chain, check_for_training, read_save, save_of
from ps.client.hold import Hold
from ps.client.session import Session, Shard
from ps.errors import CheckpointError, HoldEndedError, ReplacedError, ShardError, StaleRouteError

_PAUSE_S = 0.2
_SWITCH_S = 120.0  # for a shard to take its turn at what it has read


def load(
    session: Session, place: str | Path, timeout_s: float, rename: pb.Rename | None = None
) -> int:
    """Load a checkpoint on all shards; see ParameterClient.load."""
    store = open_store(place)
    began = time.monotonic()
    session.update_routes()
    half: _HalfLoadedError | None = None  # what a later attempt ends with does not tell of it
    while True:
        routes = session.routes
        try:
            return _load(session, store, began + timeout_s, rename)
        except (StaleRouteError, ReplacedError, HoldEndedError) as error:
            if time.monotonic() > began + timeout_s:
                late = CheckpointError(f"{store.url}: not loaded within {timeout_s:g} s: {error}")
                raise half or late from None
            if isinstance(error, StaleRouteError):
                session.refresh(routes)
        except CheckpointError as error:
            if half is None:
                raise
            raise half from error
        except ShardError as error:
            away = error.code is grpc.StatusCode.UNAVAILABLE
            if isinstance(error, _HalfLoadedError):
                half = error
            if not away or time.monotonic() > began + session.timeout_s:
                raise half or error from None
            time.sleep(_PAUSE_S)


def _load(session: Session, store: Store, limit: float, rename: pb.Rename | None) -> int:
    """One attempt; the number of rows. Until all shards have read theirs, nothing changes."""
    with Hold(session, limit) as hold:
        save = read_save(store.url, _checked)
        shards = hold.shards
        parts = [
            _Part(shard, store, index, len(shards), save, limit, rename)
            for index, shard in enumerate(shards)
        ]
        try:
            replies = session.run_on_new_threads([part.reply for part in parts])
            if any(reply.route != hold.routes.version for reply in replies):
                raise StaleRouteError("shards go by different routings")
            hold.hold_pushes()
            try:
                session.run_on_new_threads([partial(part.put_in_use, hold.cut) for part in parts])
            except ShardError as error:
                done = [part.shard.index for part in parts if part.in_use]
                raise _HalfLoadedError(
                    error.shard,
                    error.address,
                    error.code,
                    f"failed as {store.url} was put in use, which shards {done} have, and this one "
                    f"may; load again: {error}",
                ) from None
        finally:
            for part in parts:
                part.end()
    return sum(reply.rows for reply in replies)


def _checked(links: Chain) -> str:
    """Which save that is, after all of it was found to be there and whole."""
    for store, found in links:
        check_for_training(store, found)
        manifest.verify(store, found.files)
    return save_of(links)


class _HalfLoadedError(ShardError):
    """Some shards have a save in use, or may have; its attempt did not end."""


class _Part:
    """What one shard loads.

    The shard forgets what it has read when the connection ends before `put_in_use`.

    Args:
        shard: which one.
        store: where the save lies.
        index: of the shard.
        shards: how many there are.
        save: as of `save_of`.
        limit: when, by `time.monotonic`, it is to have been read.
        rename: which tables to take, under which names; None: all as they are.

    Attributes:
        in_use: whether the shard has said so.
    """

    def __init__(
        self,
        shard: Shard,
        store: Store,
        index: int,
        shards: int,
        save: str,
        limit: float,
        rename: pb.Rename | None,
    ) -> None:
        self.shard = shard
        self.in_use = False
        self._what = f"Load of {store.url}"
        self._timeout_s = max(1.0, limit - time.monotonic()) + _SWITCH_S
        self._requests: SimpleQueue[pb.LoadRequest | None] = SimpleQueue()
        request = pb.LoadRequest(directory=store.url, shard=index, shards=shards, save=save)
        if rename is not None:
            request.rename.CopyFrom(rename)
        self._requests.put(request)
        self._replies = shard.stub.Load(iter(self._requests.get, None), timeout=self._timeout_s)

    def reply(self) -> pb.LoadReply:
        """Wait for the shard's next word.

        Raises:
            ReplacedError: another save lies there.
            HoldEndedError: it has let pushes go on, and nothing was put in use.
            ShardError: no answer, or a refusal.
        """
        try:
            return self.shard.call(self._next, None, self._what, self._timeout_s, 0.0)
        except ShardError as error:
            if error.reason == SAVE_REPLACED:
                raise ReplacedError(str(error)) from None
            if error.reason == HOLD_ENDED:
                raise HoldEndedError(str(error)) from None
            raise

    def put_in_use(self, cut: str) -> None:
        """Have the shard put its rows in the place of the tables; raises as `reply`."""
        self._requests.put(pb.LoadRequest(cut=cut))
        self.reply()
        self.in_use = True

    def end(self) -> None:
        """Let the shard forget what is not in use."""
        self._requests.put(None)
        if not self.in_use:
            self._replies.cancel()

    def _next(self, request: object, timeout: float) -> pb.LoadReply:
        del request, timeout  # of the stream, which was begun with them
        return next(self._replies)
