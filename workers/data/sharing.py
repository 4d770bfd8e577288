"""Windows that one of the processes that share a folder parses, and all of them map.

The folder holds the windows that are ready; `.parser`, locked by whoever parses; and for each
reader a file, locked while it lives, with the window that it needs. The one that parses stays a
little ahead of the foremost reader, and drops the oldest windows that no reader needs any more, so
that there are never more than `Dataset.windows`. When it dies, the next reader that misses a window
goes on in its place.
"""

import fcntl
import logging
import os
import struct
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from chassis.scratch import try_lock
from workers.data.columns.arrays import Batch
from workers.data.stored import mapped, store
from workers.data.windows import OwnWindows, Stream, WindowId

_AHEAD = 2  # windows parsed before anybody needs them
_MAPPED = 2  # windows that a reader holds
_POLL_S = 0.01  # for a window that is needed
_PAUSE_S = 0.05  # until readers have gone on
_PATIENCE_S = 10.0  # with one that stays behind, while all windows that may be kept are
_NEED = struct.Struct("<qq")
_SUFFIX = ".rows"
_log = logging.getLogger("heterps.data")


class SharedWindows:
    """A reader of shared windows, which parses them for all where nobody else does.

    Where they cannot be shared it parses for itself: when the disk is full, a window is gone since
    this reader came too late, or another reader has stayed behind, as one that waits for this one.
    """

    def __init__(self, stream: Stream, folder: Path) -> None:
        self._stream = stream
        self._folder = folder
        self._own = OwnWindows(stream)
        self._mapped: OrderedDict[WindowId, Batch] = OrderedDict()
        self._shelf: _Shelf | None = None
        self._parser: _Parser | None = None
        self._alone = False

    def get(self, name: WindowId) -> Batch:
        """The rows of a window; none behind the end of a split that is read once."""
        if name not in self._mapped:
            try:
                rows = self._own.get(name) if self._alone else self._wait(name)
            except OSError as error:
                _log.warning("%s: read by each process of its own: %s", self._folder, error)
                self._alone = True
                self._leave()
                rows = self._own.get(name)
            self._mapped[name] = rows
            while len(self._mapped) > _MAPPED:
                self._mapped.popitem(last=False)
        return self._mapped[name]

    def close(self) -> None:
        """Need no window any more; the parser of this process ends when nobody else does."""
        self._own.close()
        self._mapped.clear()
        self._leave()

    def _leave(self) -> None:
        if self._shelf is not None:
            self._shelf.close()
            self._shelf = None

    def _wait(self, name: WindowId) -> Batch:
        if self._shelf is None:
            self._shelf = _Shelf(self._folder, self._stream)
        shelf = self._shelf
        shelf.need(name)
        free = time.monotonic()  # when there was room to parse, as far as is known
        while True:
            rows = shelf.find(name)
            if rows is not None:
                return rows
            if shelf.has_dropped(name):
                return self._own.get(name)
            if self._parser is None or not self._parser.is_alive():
                if self._parser is not None and self._parser.error is not None:
                    raise self._parser.error
                self._parser = _Parser.begin(self._folder, self._stream)
            if len(_ready(self._folder)) < self._stream.dataset.windows:
                free = time.monotonic()
            elif time.monotonic() - free > _PATIENCE_S:
                raise TimeoutError("a reader has stayed behind")
            time.sleep(_POLL_S)


class _Shelf:
    """The folder, as one reader sees it."""

    def __init__(self, folder: Path, stream: Stream) -> None:
        self._folder = folder
        self._nothing = stream.dataset.nothing
        self._file: int | None = None
        self._path = folder / f"{os.getpid()}-{token_hex(4)}.reader"

    def need(self, name: WindowId) -> None:
        """Tell which window is needed; those before are not."""
        if self._file is not None:
            os.pwrite(self._file, _NEED.pack(*name), 0)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        begun = self._path.with_suffix(".begun")  # a name that nobody takes for a reader's
        self._file = os.open(begun, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.pwrite(self._file, _NEED.pack(*name), 0)
        begun.rename(self._path)

    def find(self, name: WindowId) -> Batch | None:
        """A window that is ready; nothing where the split ended before; None: not yet."""
        with suppress(FileNotFoundError):
            return mapped(_path(self._folder, name), self._nothing)
        with suppress(FileNotFoundError):
            if name.number >= int((self._folder / "end").read_text()):
                return self._nothing
        return None

    def has_dropped(self, name: WindowId) -> bool:
        """Whether a window that is not there was, and will not come again."""
        later = any(found > name for found in _ready(self._folder))
        return later and not _path(self._folder, name).exists()

    def close(self) -> None:
        """Need nothing any more."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None


class _Parser(threading.Thread):
    """Parses windows for all readers of a folder until there are none, or an error.

    Attributes:
        error: that ended it.
    """

    def __init__(self, folder: Path, stream: Stream, lock: int) -> None:
        super().__init__(name="parser", daemon=True)
        self.error: Exception | None = None
        self._folder = folder
        self._stream = stream
        self._lock = lock

    @staticmethod
    def begin(folder: Path, stream: Stream) -> "_Parser | None":
        """Start one, unless another process, or thread, parses already."""
        lock = os.open(folder / ".parser", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(lock):
            os.close(lock)
            return None
        parser = _Parser(folder, stream, lock)
        parser.start()
        return parser

    def run(self) -> None:
        """Parse, beginning with the first window that a reader misses."""
        try:
            needed = self._needed()
            if not needed:
                return
            start, ready = min(needed), set(_ready(self._folder))
            while start in ready:
                start = self._stream.after(start)
            last = None
            for name, rows in self._stream.windows(start):
                if not self._make_room(name):
                    return
                self._put(name, rows)
                last = name
            if self._stream.in_order:  # the others know where epochs end
                end = last.number + 1 if last is not None else start.number
                unfinished = self._folder / "end.unfinished"
                unfinished.write_text(str(end))
                unfinished.rename(self._folder / "end")
        except Exception as error:
            self.error = error
        finally:
            os.close(self._lock)

    def _put(self, name: WindowId, rows: Batch) -> None:
        path = _path(self._folder, name)
        if not path.exists():
            unfinished = self._folder / "window.unfinished"
            store(unfinished, [rows], len(rows), rows)
            unfinished.rename(path)

    def _make_room(self, name: WindowId) -> bool:
        """Wait until a window may come; False when nobody reads any more."""
        most = self._stream.dataset.windows
        while needed := self._needed():
            ready = sorted(_ready(self._folder))
            while len(ready) >= most and ready[0] < min(needed):
                _path(self._folder, ready.pop(0)).unlink(missing_ok=True)
            ahead = sum(window > max(needed) for window in ready)
            if len(ready) < most and ahead < _AHEAD:
                return True
            time.sleep(_PAUSE_S)
        return False

    def _needed(self) -> list[WindowId]:
        """The window that each reader needs; those who died need none."""
        found = []
        for path in self._folder.glob("*.reader"):
            with suppress(FileNotFoundError):
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if try_lock(file):
                        path.unlink()
                    else:
                        found.append(WindowId(*_NEED.unpack(os.pread(file, _NEED.size, 0))))
                finally:
                    os.close(file)
        return found


def _ready(folder: Path) -> list[WindowId]:
    names = [path.stem.split("-") for path in folder.glob(f"*{_SUFFIX}")]
    return [WindowId(int(epoch), int(number)) for epoch, number in names]


def _path(folder: Path, name: WindowId) -> Path:
    return folder / f"{name.epoch}-{name.number}{_SUFFIX}"
