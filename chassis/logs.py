"""How log lines are written: for people, or one JSON object a line for collectors."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

FORMAT = "HETERPS_LOG_FORMAT"
LONGEST = 64 << 10  # bytes of a message; collectors drop or split longer lines
_FORMATS = ("auto", "text", "json")
_NAMES = ("job", "stage", "worker", "shard", "step")
_process: dict[str, Any] = {}
_scope: ContextVar[dict[str, Any] | None] = ContextVar("heterps_log_scope", default=None)


def log_format() -> str:
    """What HETERPS_LOG_FORMAT asks for; ends the process where it asks for anything else."""
    wanted = os.environ.get(FORMAT) or "auto"
    if wanted not in _FORMATS:
        print(f"error: {FORMAT}={wanted}: expected {', '.join(_FORMATS)}", file=sys.stderr)
        raise SystemExit(2)
    return wanted


def log_fields(**values: str | int | Callable[[], int]) -> None:
    """Say what all further lines of this process are about.

    Args:
        values: `job`, `stage`, `worker`, `shard`, `step`; a callable is asked at each line.
    """
    _check(values)
    _process.update(values)


@contextmanager
def log_scope(**values: str | int) -> Iterator[None]:
    """Say what the lines of this thread are about, within the block; as `log_fields`."""
    _check(values)
    token = _scope.set({**(_scope.get() or {}), **values})
    try:
        yield
    finally:
        _scope.reset(token)


class JsonFormatter(logging.Formatter):
    """A record as a JSON object on one line, with what `log_fields` and `log_scope` said."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        said = {**_process, **(_scope.get() or {})}
        for name in _NAMES:
            if name in said:
                value = said[name]
                line[name] = value() if callable(value) else value
        if record.exc_info:
            line["exception"] = _cut(self.formatException(record.exc_info))
        elif record.exc_text:
            line["exception"] = _cut(record.exc_text)
        return json.dumps(line)


def readable(line: str) -> str:
    """A line as the text format would have it, where it is one of ours in JSON."""
    if not line.startswith('{"time": "'):
        return line
    try:
        found = json.loads(line)
        head = f"{found['time'][11:19]} {found['level'][:1].upper()} {found['role']}"
        text = f"{head}: {found['message']}"
    except (ValueError, KeyError, TypeError):
        return line
    return f"{text}\n{found['exception']}" if "exception" in found else text


def _check(values: dict[str, Any]) -> None:
    if strange := values.keys() - set(_NAMES):
        raise ValueError(f"log field {min(strange)!r}: expected one of {', '.join(_NAMES)}")


def _cut(text: str) -> str:
    """The beginning of what is too long, and a note."""
    data = text.encode(errors="replace")
    if len(data) <= LONGEST:
        return text
    kept = data[:LONGEST].decode(errors="ignore")
    return f"{kept} … (cut: it has {len(data)} bytes, {LONGEST} are kept)"
