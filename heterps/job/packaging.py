"""A job's code as one archive: the same files give the same bytes, whoever packs them and when.

What is left out: what `.heterpsignore` says, in the rules of `.gitignore`; without that file, what
`.gitignore` says; and always version control, caches and virtual environments, folders that HeterPS
wrote (`chassis.written`), and what looks like a secret (`heterps.job.secrets`). Of the last two it
is told, and a rule that begins with ! takes them along.
"""

import gzip
import os
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from chassis.transfer import Content
from chassis.written import is_marked
from heterps.errors import CodeError
from heterps.job import secrets
from heterps.view.figures import size

IGNORE = ".heterpsignore"
_GITIGNORE = ".gitignore"
_ALWAYS = (
    *(".git/", ".hg/", ".svn/", "__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/"),
    *(".mypy_cache/", ".ruff_cache/", ".pytest_cache/", ".ipynb_checkpoints/", ".tox/", ".idea/"),
    *(".DS_Store", "*.egg-info/", ".heterps/", "*.study*", "*.best.yaml"),
)
_MOST_FILES = 20_000  # nodes unpack no more
_SHOWN = 5
_LEVEL = 6


@dataclass(frozen=True, slots=True)
class Code:
    """Packed code.

    Attributes:
        content: the archive, .tar.gz.
        files: paths in it, relative to the folder, sorted.
        left_out: what is not in it and might have been expected there, with why.
    """

    content: Content
    files: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(slots=True)
class _LeftOut:
    """What is to be told of."""

    others: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    def lines(self) -> tuple[str, ...]:
        """A line for each; folders that HeterPS wrote together, since they are many."""
        lines = [*sorted(self.others), *sorted(self.secrets)]
        if self.written:
            shown = ", ".join(f"{name}/" for name in sorted(self.written)[:_SHOWN])
            more = len(self.written) - _SHOWN
            lines.append(f"{shown}{f' and {more} more' if more > 0 else ''}: HeterPS wrote it")
        return tuple(lines)


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    name: str  # relative, with slashes
    bytes: int
    executable: bool


def pack(folder: Path, limit_bytes: int) -> Code:
    """Pack a folder.

    Args:
        folder: absolute.
        limit_bytes: of all files, before they are compressed.

    Raises:
        CodeError: it is too large, naming the biggest files; or a file cannot be read.
    """
    left_out = _LeftOut()
    try:
        # A home folder has millions: what is clearly too much is not looked at to its end.
        found = sorted(islice(_walk(folder, left_out), 5 * _MOST_FILES), key=lambda one: one.name)
        total = sum(one.bytes for one in found)
        if total > limit_bytes or len(found) > _MOST_FILES:
            raise CodeError(_too_large(folder, found, total, limit_bytes))
        output = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - closed when collected
        _write(output, found)
    except OSError as error:
        raise CodeError(f"code: {error.filename or folder}: {error.strerror or error}") from None
    content = Content.of(output)
    if content.bytes > limit_bytes:
        raise CodeError(_too_large(folder, found, content.bytes, limit_bytes))
    return Code(content, tuple(one.name for one in found), left_out.lines())


def _write(output: BinaryIO, found: list[_Found]) -> None:
    # Nothing of this machine or moment goes in: neither times, owners nor the archive's name.
    with (
        gzip.GzipFile("", "wb", _LEVEL, output, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for one in found:
            entry = tarfile.TarInfo(one.name)
            entry.mode = 0o755 if one.executable else 0o644
            with one.path.open("rb") as stream:
                entry.size = os.fstat(stream.fileno()).st_size
                archive.addfile(entry, stream)


def _walk(folder: Path, left_out: _LeftOut) -> Iterator[_Found]:
    """The files to pack, not in order; folders that are ignored are not looked into."""
    from pathspec import GitIgnoreSpec

    rules = folder / IGNORE
    if not rules.is_file():
        rules = folder / _GITIGNORE
    lines = rules.read_text(errors="replace").splitlines() if rules.is_file() else []
    ignored = GitIgnoreSpec.from_lines([*_ALWAYS, *lines])
    kept = GitIgnoreSpec.from_lines(line[1:] for line in lines if line.startswith("!"))
    root = os.path.realpath(folder)
    waiting = [folder]
    while waiting:
        for entry in os.scandir(waiting.pop()):
            name = Path(entry.path).relative_to(folder).as_posix()
            is_folder = entry.is_dir(follow_symlinks=False)
            named = f"{name}/" if is_folder else name
            if ignored.match_file(named):
                continue
            wanted = kept.match_file(named)
            if not wanted and secrets.by_name(named):
                left_out.secrets.append(f"{named}: it looks like a secret, by its name")
                continue
            if is_folder:
                if not wanted and is_marked(Path(entry.path)):
                    left_out.written.append(name)
                    continue
                waiting.append(Path(entry.path))
                continue
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if not os.path.isfile(target) or os.path.commonpath([root, target]) != root:
                    left_out.others.append(f"{name}: a link to {os.readlink(entry.path)}")
                    continue
            status = entry.stat()
            if not stat.S_ISREG(status.st_mode):
                left_out.others.append(f"{name}: neither a file nor a folder")
                continue
            kind = "" if wanted else secrets.by_content(Path(entry.path), status.st_size)
            if kind:
                left_out.secrets.append(f"{name}: it holds {kind}")
                continue
            yield _Found(Path(entry.path), name, status.st_size, bool(status.st_mode & 0o100))


def _too_large(folder: Path, found: list[_Found], total: int, limit_bytes: int) -> str:
    biggest = sorted(found, key=lambda one: (-one.bytes, one.name))[:_SHOWN]
    lines = [f"  {size(one.bytes):>8}  {one.name}" for one in biggest]
    return "\n".join(
        [
            f"code: {folder} has {len(found)} files of {size(total)}; the cluster takes at most "
            f"{_MOST_FILES} files of {size(limit_bytes)}. The biggest:",
            *lines,
            f"Name what jobs do not need in {folder / IGNORE}, by the rules of .gitignore, and "
            "type the command again; data that is left out is read by nodes from the same path.",
        ]
    )
