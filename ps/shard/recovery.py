"""What a shard's logs bring back when it starts again."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from chassis.files import sync_file, sync_folder
from ps.errors import DamageError
from ps.shard import logfile
from ps.shard.logfile import DamagedFileError, LogFile, Lost
from ps.shard.replay import replay
from ps.shard.state import ShardState


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was brought back.

    Attributes:
        records: how many changes.
        number: of the file to go on in.
        before: bytes of the last file that count.
        bytes: of all files.
        damage: what was lost, in words; empty where nothing was.
    """

    records: int
    number: int
    before: int
    bytes: int
    damage: str = ""


def recover(
    state: ShardState,
    directory: Path,
    first: int,
    reached: tuple[int, int] | None = None,
    *,
    accept_loss: bool,
) -> Recovered:
    """Repeat the changes that the logs have.

    Args:
        state: as the base has it.
        directory: of the shard.
        first: number of the file that goes on from the base.
        reached: number of the newest file there was, and how many bytes of it were acknowledged.
        accept_loss: stop where a log is damaged, and keep what cannot be used under other names.

    Raises:
        DamageError: a log is damaged or missing, and its loss is not accepted.
    """
    found = [(path, number) for path, number in logfile.paths(directory) if number >= first]
    files, damage = _open(directory, found, first)
    number = found[-1][1] + 1 if found else first
    if damage is None and files and files[-1].header is None:
        number = files.pop().number  # begun, and nothing was written to it
    records, usable = 0, len(files)
    for index, file in enumerate(files):
        last = index + 1 == len(files)
        following = None if last else files[index + 1].header
        try:
            for record, payload in file.records(following.before if following else None):
                replay(state, record, payload)
                records += 1
        except DamagedFileError as error:
            damage, usable = error, index
            break
    told, cut = "", 0
    if damage is None and reached is not None:
        damage, cut = _cut_off(directory, files, *reached)
        usable -= cut > 0
    if damage is not None:
        lost = _lost(files[usable:], [path for path, _ in found[usable:]])
        lost.bytes += cut
        told = f"{damage}, and what was acknowledged goes on: {lost} cannot be taken back"
        if not accept_loss:
            raise DamageError(
                f"{told}; --accept-loss starts this shard without them, and keeps the damaged files"
            )
        number = found[-1][1] + 1 if found else first
        for path, _ in found[usable:]:
            _keep(path)
    elif files:
        sync_file(files[-1].path)  # what it has is built upon
    return Recovered(
        records,
        number,
        files[-1].good if files else 0,
        sum(path.stat().st_size for path, _ in found),
        told,
    )


def _open(
    directory: Path, found: Sequence[tuple[Path, int]], first: int
) -> tuple[list[LogFile], DamagedFileError | None]:
    """The files whose headers are good, in their order, and what ends these."""
    files: list[LogFile] = []
    if not found and first > 1:  # it was there before the base was
        return [], DamagedFileError(directory / logfile.name_of(first), 0, "missing")
    for path, number in found:
        if number != first + len(files):
            missing = directory / logfile.name_of(first + len(files))
            return files, DamagedFileError(missing, 0, "missing")
        if files and files[-1].header is None:
            return files[:-1], DamagedFileError(files[-1].path, 0, "damaged")
        try:
            files.append(LogFile(path, number))
        except DamagedFileError as error:
            return files, error
    return files, None


def _cut_off(
    directory: Path, files: Sequence[LogFile], number: int, size: int
) -> tuple[DamagedFileError | None, int]:
    """Whether the newest file, or the end of it, has gone; how many bytes of one that is there."""
    if files and files[-1].number > number:
        return None, 0  # it was made by somebody who tells nothing
    if not files or files[-1].number < number:
        return DamagedFileError(directory / logfile.name_of(number), 0, "missing"), 0
    lacking = size - files[-1].good
    if lacking <= 0:
        return None, 0
    return DamagedFileError(files[-1].path, files[-1].good, "cut off"), lacking


def _lost(read: Sequence[LogFile], paths: Sequence[Path]) -> Lost:
    """What lies behind damage.

    Args:
        read: the file that has it and those after it, as far as their headers are good.
        paths: of all of them.
    """
    lost = Lost()
    for path in paths:
        lost.bytes += path.stat().st_size
    for file in read:
        behind = file.lost()
        lost.bytes -= file.size - behind.bytes
        lost.records += behind.records
    return lost


def keep_folder(path: Path) -> None:
    """Give a base that no manifest names any more a name under which it stays."""
    kept = next(name for name in _kept_names(path) if not name.exists())
    path.rename(kept)
    sync_folder(path.parent)


def _keep(path: Path) -> None:
    """Give a damaged file a second name, which stays when the log goes."""
    for kept in _kept_names(path):
        if not kept.exists():
            os.link(path, kept)
            sync_folder(path.parent)
            return
        if kept.samefile(path):
            return


def _kept_names(path: Path) -> Iterator[Path]:
    for attempt in count():
        yield path.with_name(f"damaged-{path.name}" + (f"-{attempt}" if attempt else ""))
