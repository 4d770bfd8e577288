"""A checkpoint of all shards: one cut, coordinated by the client that saves."""

import time
from functools import partial
from pathlib import Path
from uuid import uuid4

import numpy as np

from protos import parameter_server_pb2 as pb
from protos.reason_pb2 import WHOLE_SAVE_NEEDED
from ps.checkpoint import manifest
from ps.checkpoint.manifest import File, Manifest, Parent
from ps.checkpoint.places import open_store
from ps.checkpoint.rowfile import spec_of
from ps.checkpoint.store import Store
from ps.checkpoint.tables import chain, check_for_training, relative_place
from ps.client.session import Routes, Session, Shard
from ps.engine import _native
from ps.errors import CheckpointError, DeltaError, ShardError, StaleRouteError
from ps.table.applied import AppliedWindow, PushId, messages_of
from ps.table.buckets import default_route

_HOLD_S = 20.0
_PATIENCE_S = 2.0  # for pushes that are applied in part; a client that died will not finish them


def save(
    session: Session,
    place: str | Path,
    timeout_s: float,
    *,
    prefix: str,
    mode: str,
    since: str | Path | None,
) -> None:
    """Write a checkpoint; see ParameterClient.save."""
    if mode not in manifest.MODES:
        raise CheckpointError(f"mode={mode!r}; expected {', '.join(manifest.MODES)}")
    if (mode == "delta" and since is None) or (mode in ("checkpoint", "base") and since):
        raise CheckpointError(f"mode={mode!r} with since={since!r}; expected one for delta only")
    store = open_store(place)
    manifest.check_free(store)
    parent_store = open_store(since) if since is not None else None
    parent = manifest.read_manifest(parent_store) if parent_store is not None else None
    folder = manifest.new_id()
    cut, routes, lost = _begin_cut(session, timeout_s)
    shards = session.shards_of(routes)
    try:
        if parent is not None:
            _check_parent(store, parent_store, parent, mode, len(shards))
        requests = [
            pb.SaveRequest(
                directory=f"{store.url}/{folder}",
                shard=index,
                shards=len(shards),
                prefix=prefix,
                cut=cut,
                mode=mode,
                since=parent.generations[index] if parent else {},
                run=parent.runs[index] if parent else "",
                lost=messages_of(lost),
            )
            for index in range(len(shards))
        ]
        replies: list[pb.SaveReply] = session.run_on_new_threads(
            [
                partial(shard.call, shard.stub.Save, request, f"Save to {store.url}", timeout_s)
                for shard, request in zip(shards, requests, strict=True)
            ]
        )
    except BaseException as error:
        _abandon(shards, cut)
        store.remove(folder)
        if isinstance(error, ShardError) and error.reason == WHOLE_SAVE_NEEDED:
            raise DeltaError(str(error)) from None
        raise
    files = tuple(
        File.of(file, index) for index, reply in enumerate(replies) for file in reply.files
    )
    specs = {name: spec_of(store, file.name) for name, file in manifest.first_files(files).items()}
    even = (routes.route == default_route(len(shards))).all()
    manifest.write_manifest(
        store,
        Manifest(
            id=folder,
            mode=mode,
            shards=len(shards),
            files=files,
            tables=manifest.specs_as_json(specs),
            route=None if even else tuple(int(s) for s in routes.route),
            generations=tuple(dict(reply.generations) for reply in replies),
            runs=tuple(reply.run for reply in replies),
            parent=(
                Parent(relative_place(store, parent_store), parent.id)
                if parent is not None and parent_store is not None
                else None
            ),
            positions=_positions(replies),
            torn=len(lost),
        ),
    )


def load(session: Session, place: str | Path, timeout_s: float) -> int:
    """Load a checkpoint on all shards; see ParameterClient.load."""
    store = open_store(place)
    for link, found in chain(store):
        check_for_training(link, found)
        manifest.verify(link, found.files)
    session.update_routes()
    shards = session.shards
    rows: list[int] = session.run_on_new_threads(
        [
            partial(_load_one, shard, store, index, len(shards), timeout_s)
            for index, shard in enumerate(shards)
        ]
    )
    return sum(rows)


def _load_one(shard: Shard, store: Store, index: int, shards: int, timeout_s: float) -> int:
    request = pb.LoadRequest(directory=store.url, shard=index, shards=shards)
    reply: pb.LoadReply = shard.call(shard.stub.Load, request, f"Load of {store.url}", timeout_s)
    return reply.rows


def _begin_cut(session: Session, timeout_s: float) -> tuple[str, Routes, set[PushId]]:
    """A cut of all shards, by one routing: its name, the routing, and what is lost."""
    limit = time.monotonic() + timeout_s
    while True:
        routes, cut = session.routes, uuid4().hex
        try:
            _reserve(session.shards_of(routes), cut, limit)
            return cut, routes, _cut(session, routes, cut)
        except StaleRouteError:
            _abandon(session.shards_of(routes), cut)
            if time.monotonic() > limit:
                raise CheckpointError(
                    f"shards went by different routings for {timeout_s:g} s; finish the reshard "
                    "that was begun: repeat it"
                ) from None
            session.refresh(routes)
        except BaseException:
            _abandon(session.shards_of(routes), cut)
            raise


def _reserve(shards: list[Shard], cut: str, limit: float) -> None:
    """Wait for our turn on all shards. The first comes first, so that two saves do not cross."""
    while True:
        for shard in shards:
            reply: pb.CutReply = shard.call(shard.stub.Cut, pb.CutRequest(id=cut), "Cut")
            if reply.busy:
                break
        else:
            return
        if time.monotonic() > limit:
            raise CheckpointError(
                f"shard {shard.index} ({shard.address}) is busy with another save; try again later"
            )


def _cut(session: Session, routes: Routes, cut: str) -> set[PushId]:
    """Hold pushes back on all shards, but have those finished that one of them has applied.

    Returns:
        What was not finished in time: its sender is gone.
    """
    admitted: set[PushId] = set()
    limit = time.monotonic() + _PATIENCE_S
    while True:
        request = pb.CutRequest(id=cut, hold_s=_HOLD_S, admit=messages_of(admitted))
        replies: list[pb.CutReply] = session.run_on_new_threads(
            [
                partial(shard.call, shard.stub.Cut, request, "Cut")
                for shard in session.shards_of(routes)
            ]
        )
        if any(reply.busy for reply in replies):
            raise CheckpointError("a shard was too slow to be cut; try again")
        if any(reply.route != routes.version for reply in replies):
            raise StaleRouteError("shards go by different routings")
        missing = _unfinished(replies)
        if not missing or time.monotonic() > limit:
            return missing
        if admitted:
            time.sleep(0.005)
        admitted = missing


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


def _abandon(shards: list[Shard], cut: str) -> None:
    for shard in shards:
        try:
            shard.call(shard.stub.Cut, pb.CutRequest(id=cut, abandon=True), "Cut", 2.0, 0.0)
        except ShardError:
            continue  # its hold ends by itself


def _positions(replies: list[pb.SaveReply]) -> dict[str, str]:
    newest: dict[str, pb.Position] = {}
    for reply in replies:
        for position in reply.positions:
            latest = newest.get(position.client)
            at = (position.epoch, position.sequence)
            if latest is None or (latest.epoch, latest.sequence) < at:
                newest[position.client] = position
    return {client: position.position for client, position in sorted(newest.items())}


def _check_parent(
    store: Store, parent_store: Store | None, parent: Manifest, mode: str, shards: int
) -> None:
    wanted = ("checkpoint", "delta") if mode == "delta" else ("base", "serving")
    where = parent_store.url if parent_store is not None else ""
    if parent.mode not in wanted:
        raise CheckpointError(
            f"since={where}: holds mode {parent.mode!r}; expected {' or '.join(wanted)}"
        )
    if parent.shards != shards:
        raise DeltaError(
            f"since={where}: was written by {parent.shards} shards; there are {shards} now: save a "
            "whole checkpoint first"
        )
    if where == store.url:
        raise CheckpointError(f"since={where}: is the place to write to; expected another")
