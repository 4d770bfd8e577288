"""Parameter-server shards: what each holds, how it is used."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterps.report.terminal import heading, indented, table
from heterps.view.figures import count, duration, percent, size
from protos.parameter_server_pb2 import StatsReply, TableStats

_COUNTS = (
    *("rows", "bytes", "pulled", "pushed", "missed", "waiting", "evicted"),
    *("disk_rows", "disk_bytes", "promoted", "demoted", "tidied"),
)
_PROCESS = ("cpu_seconds", "resident_bytes", "bytes_in", "bytes_out", "log_bytes", "uptime_s")


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What a shard said, or why it did not."""

    address: str
    stats: StatsReply | None
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        if self.stats is None:
            return {"address": self.address, "up": False, "reason": self.problem}
        return {
            "address": self.address,
            "up": True,
            **{name: getattr(self.stats, name) for name in _PROCESS},
            "tables": [_json(one) for one in self.stats.tables],
        }


def stats_report(shards: Sequence[ShardReport]) -> RenderableType:
    """A table a shard, and one of all of them together."""
    parts: list[RenderableType] = []
    for number, shard in enumerate(shards):
        parts.append(heading(f"Shard {number} at {shard.address}"))
        if shard.stats is None:
            parts.append(indented(Text(shard.problem, style="red", overflow="fold")))
            continue
        parts.append(indented(Text(_process(shard.stats), style="dim", overflow="fold")))
        if shard.stats.tables:
            parts.append(indented(tables_table(shard.stats.tables)))
        else:
            parts.append(Text("  no tables"))
    answered = [shard.stats for shard in shards if shard.stats is not None]
    if len(answered) > 1 and any(stats.tables for stats in answered):
        parts.append(heading(f"Together, {len(answered)} shards"))
        parts.append(indented(tables_table(_together(answered))))
    parts.append(Text("\n  hit: pulled keys that had a row; B/row: of memory", style="dim"))
    return Group(*parts)


def tables_table(tables: Iterable[TableStats]) -> Table:
    """One row a table; columns that are empty for all of them are left out."""
    shown = sorted(tables, key=lambda one: one.name)
    columns: list[tuple[str, Callable[[TableStats], str], bool]] = [
        ("table", lambda t: t.name, True),
        (">dim", lambda t: str(t.dim), True),
        (">rows", lambda t: count(t.rows), True),
        (">memory", lambda t: size(t.bytes), True),
        (">B/row", lambda t: count(t.bytes / in_memory) if (in_memory := _held(t)) else "", True),
        (">hit", lambda t: percent(hit) if (hit := hit_rate(t)) is not None else "", True),
        (">pulled", lambda t: count(t.pulled), True),
        (">pushed", lambda t: count(t.pushed), True),
        (">waiting", lambda t: count(t.waiting), any(t.waiting for t in shown)),
        (">evicted", lambda t: count(t.evicted), any(t.evicted for t in shown)),
        (">on disk", lambda t: count(t.disk_rows), any(t.disk_bytes for t in shown)),
        (">disk", lambda t: size(t.disk_bytes), any(t.disk_bytes for t in shown)),
    ]
    kept = [(name, cell) for name, cell, is_shown in columns if is_shown]
    made = table(*(name for name, _ in kept))
    for one in shown:
        made.add_row(*(cell(one) for _, cell in kept))
    return made


def hit_rate(one: TableStats) -> float | None:
    """The share of pulled keys that had a row; None before any pull."""
    return 1 - one.missed / one.pulled if one.pulled else None


def _held(one: TableStats) -> int:
    return max(0, one.rows - one.disk_rows)


def _json(one: TableStats) -> dict[str, Any]:
    held = _held(one)
    return {
        "name": one.name,
        "dim": one.dim,
        **{name: getattr(one, name) for name in _COUNTS},
        "bytes_per_row": one.bytes / held if held else None,
        "hit_rate": hit_rate(one),
    }


def _process(stats: StatsReply) -> str:
    parts = [
        f"up {duration(stats.uptime_s)}" if stats.uptime_s else "",
        f"CPU {duration(stats.cpu_seconds)}",
        f"memory {size(stats.resident_bytes)}",
        f"in {size(stats.bytes_in)}, out {size(stats.bytes_out)}" if stats.bytes_out else "",
        f"log {size(stats.log_bytes)}" if stats.log_bytes else "",
    ]
    return ", ".join(part for part in parts if part)


def _together(shards: Sequence[StatsReply]) -> list[TableStats]:
    total: dict[str, TableStats] = {}
    for stats in shards:
        for one in stats.tables:
            sums = total.setdefault(one.name, TableStats(name=one.name, dim=one.dim))
            for name in _COUNTS:
                setattr(sums, name, getattr(sums, name) + getattr(one, name))
    return list(total.values())
