"""A checkpoint of all shards: one cut, coordinated by the client that saves."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from protos import parameter_server_pb2 as pb
from protos.reason_pb2 import HOLD_ENDED, WHOLE_SAVE_NEEDED
from ps.checkpoint import manifest
from ps.checkpoint.manifest import File, Manifest, Parent
from ps.checkpoint.places import open_store
from ps.checkpoint.rowfile import spec_of
from ps.checkpoint.store import Store
from ps.checkpoint.tables import Chain, chain, relative_place, save_of
from ps.client.hold import Hold
from ps.client.session import Session
from ps.errors import CheckpointError, DeltaError, HoldEndedError, ShardError, StaleRouteError
from ps.table.applied import PushId, messages_of
from ps.table.buckets import default_route


def save(
    session: Session,
    place: str | Path,
    timeout_s: float,
    *,
    prefix: str,
    mode: str,
    since: str | Path | None,
    held: Callable[[], None] | None = None,
) -> None:
    """Write a checkpoint; see ParameterClient.save."""
    if mode not in manifest.MODES:
        raise CheckpointError(f"mode={mode!r}; expected {', '.join(manifest.MODES)}")
    if (mode == "delta" and since is None) or (mode in ("checkpoint", "base") and since):
        raise CheckpointError(f"mode={mode!r} with since={since!r}; expected one for delta only")
    store = open_store(place)
    parent_store = open_store(since) if since is not None else None
    limit = time.monotonic() + timeout_s
    called: list[bool] = []

    def on_hold() -> None:
        called.append(True)
        if held is not None:
            held()

    while True:
        routes = session.routes
        try:
            return _save(session, store, timeout_s, limit, prefix, mode, parent_store, on_hold)
        except StaleRouteError:
            if held is not None and called:
                raise CheckpointError("shards changed their routing while they were cut") from None
            if time.monotonic() > limit:
                raise CheckpointError(
                    f"shards went by different routings for {timeout_s:g} s; finish the reshard "
                    "that was begun: repeat it"
                ) from None
            session.refresh(routes)
        except HoldEndedError:
            if time.monotonic() > limit or (held is not None and called):
                raise


def _save(
    session: Session,
    store: Store,
    timeout_s: float,
    limit: float,
    prefix: str,
    mode: str,
    parent_store: Store | None,
    on_hold: Callable[[], None],
) -> None:
    """One attempt, by one routing."""
    switch = manifest.begin_save(store)
    before = manifest.replaced(switch)
    links = [] if parent_store is None else _builds_on(store, before, parent_store, mode)
    parent = links[-1][1] if links else None
    folder = manifest.new_id()
    try:
        with Hold(session, limit) as hold:
            lost = hold.hold_pushes()
            on_hold()
            if parent_store is not None and parent is not None:
                _check_parent(parent_store, parent, mode, len(hold.shards))
            replies = _write_parts(
                session, hold, f"{store.url}/{folder}", timeout_s, prefix, mode, parent, lost
            )
        files = tuple(
            File.of(file, index) for index, reply in enumerate(replies) for file in reply.files
        )
        manifest.check_sizes(store, files)  # whether all shards have written to this very place
        first = manifest.first_files(files)
        saved = [{f.table: f.rows for f in reply.files if f.table} for reply in replies]
        _check_tables(store, before, saved)
        specs = {name: spec_of(store, file.name) for name, file in first.items()}
        stays = save_of(links)
        if parent_store and save_of(_builds_on(store, before, parent_store, mode)) != stays:
            raise DeltaError(
                f"since={parent_store.url}: another save has been made there meanwhile, or where a "
                "save lies that it builds on; expected all that the delta builds on to stay"
            )
    except BaseException as error:
        store.remove(folder)
        if isinstance(error, CheckpointError) and not isinstance(error, HoldEndedError):
            switch.check()  # what another save has removed is not what went wrong
        raise
    even = (hold.routes.route == default_route(len(replies))).all()
    manifest.write_manifest(
        switch,
        Manifest(
            id=folder,
            mode=mode,
            shards=len(replies),
            files=files,
            tables=manifest.specs_as_json(specs),
            route=None if even else tuple(int(s) for s in hold.routes.route),
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


def _write_parts(
    session: Session,
    hold: Hold,
    directory: str,
    timeout_s: float,
    prefix: str,
    mode: str,
    parent: Manifest | None,
    lost: set[PushId],
) -> list[pb.SaveReply]:
    """Have every shard write its files of the cut.

    Raises:
        DeltaError: a shard cannot tell what has changed since `parent`.
        HoldEndedError: a shard has let pushes go on before it was asked.
        ShardError: a shard did not answer, or refused.
    """
    shards = hold.shards
    requests = [
        pb.SaveRequest(
            directory=directory,
            shard=index,
            shards=len(shards),
            prefix=prefix,
            cut=hold.cut,
            mode=mode,
            since=parent.generations[index] if parent else {},
            run=parent.runs[index] if parent else "",
            lost=messages_of(lost),
        )
        for index in range(len(shards))
    ]
    try:
        return session.run_on_new_threads(
            [
                partial(shard.call, shard.stub.Save, request, f"Save to {directory}", timeout_s)
                for shard, request in zip(shards, requests, strict=True)
            ]
        )
    except ShardError as error:
        if error.reason == WHOLE_SAVE_NEEDED:
            raise DeltaError(str(error)) from None
        if error.reason == HOLD_ENDED:
            raise HoldEndedError(str(error)) from None
        raise


def _positions(replies: list[pb.SaveReply]) -> dict[str, str]:
    newest: dict[str, pb.Position] = {}
    for reply in replies:
        for position in reply.positions:
            latest = newest.get(position.client)
            at = (position.epoch, position.sequence)
            if latest is None or (latest.epoch, latest.sequence) < at:
                newest[position.client] = position
    return {client: position.position for client, position in sorted(newest.items())}


def _check_parent(parent_store: Store, parent: Manifest, mode: str, shards: int) -> None:
    wanted = ("checkpoint", "delta") if mode == "delta" else ("base", "serving")
    where = parent_store.url
    if parent.mode not in wanted:
        raise CheckpointError(
            f"since={where}: holds mode {parent.mode!r}; expected {' or '.join(wanted)}"
        )
    if parent.shards != shards or not parent.generations or not parent.runs:
        raise DeltaError(
            f"since={where}: was written by {parent.shards} shards; there are {shards} now: save a "
            "whole checkpoint first"
        )


def _check_tables(
    store: Store, before: Manifest | None, of_shards: Sequence[Mapping[str, int]]
) -> None:
    """Refuse what is saved when a shard was started again without what it had.

    Args:
        store: the place.
        before: the save there that this one would replace.
        of_shards: the tables that each has saved, with the number of rows.

    Raises:
        CheckpointError: a shard lacks a table of which others have rows, or none has any, where
            the save that this one would replace has some.
    """
    tables = {name for found in of_shards for name in found}
    for name in sorted(tables):
        lacking = [index for index, found in enumerate(of_shards) if name not in found]
        if lacking and any(found.get(name) for found in of_shards):
            raise CheckpointError(
                f"table {name!r} is not on shards {lacking}; expected it on all. Where these were "
                "started again without it, load a save"
            )
    if not tables and before is not None and before.tables:
        raise CheckpointError(
            f"{store.url}: has {len(before.tables)} tables, and the shards have none to "
            "save; expected another place, or an empty one"
        )


def _builds_on(store: Store, before: Manifest | None, parent_store: Store, mode: str) -> Chain:
    """The parent of a save and, where it could not be loaded without, all that this builds on.

    Args:
        store: the place to write to.
        before: the save there that this one would replace.

    Raises:
        DeltaError: one of these cannot be read.
        CheckpointError: one is what the save would replace.
    """
    try:
        if mode != "delta" and before is None:
            # Of weights that were published long ago the oldest have gone.
            return [(parent_store, manifest.read_manifest(parent_store))]
        links = chain(parent_store)
    except CheckpointError as error:
        raise DeltaError(f"since={parent_store.url}: {error}; save a whole one first") from None
    if before is not None and before.id in [found.id for _, found in links]:
        raise CheckpointError(
            f"since={parent_store.url}: builds on what lies in {store.url}, which is the "
            "place to write to; expected another"
        )
    return links
