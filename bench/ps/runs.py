"""Runs of the parameter-server benchmark: who takes turns, for how long, and what comes of it."""

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.answering import Answer, PeerError
from bench.ps.batches import Shape, write
from bench.ps.clients import ClientProcess, close_all
from bench.ps.peers.check import TOLERANCE
from bench.ps.peers.peer import Setting
from bench.ps.roster import OURS, Entry
from heterps.home import certs

WORKLOADS = ("zipf", "distinct")
OPS = ("pull", "push", "both")
_MEMORY_FACTOR = 2.5  # of weights and accumulators: a table that grows holds its old self too
_PEAK_FACTOR = 1.5  # of the most a row took so far


@dataclass(slots=True)
class Options:
    """What to run.

    Attributes:
        rounds: turns of every peer at every measurement.
        round_s: seconds of a turn, unless `calls` are made before.
        rows: how far tables grow for memory and cost by size.
        growers: peers whose tables grow.
    """

    shape: Shape
    entries: list[Entry]
    peers_dir: Path
    dims: tuple[int, ...] = (16, 64)
    shards: tuple[int, ...] = (1, 2)
    rounds: int = 10
    round_s: float = 0.3
    calls: int = 20
    rows: int = 10_000_000
    growers: tuple[str, ...] = (OURS, "tfra")
    say: Callable[[str], None] = print


@dataclass(slots=True)
class Results:
    """What came of it, as JSON keeps it."""

    distinct: dict[str, float] = field(default_factory=dict)
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    fills: list[Answer] = field(default_factory=list)
    checks: list[Answer] = field(default_factory=list)
    measurements: list[Answer] = field(default_factory=list)
    growth: list[Answer] = field(default_factory=list)


def run(options: Options, save: Callable[[Results], None]) -> Results:
    """Measure everything; `save` after each part.

    Raises:
        PeerError: HeterPS itself failed, or ends with other rows than the reference.
    """
    results = Results()
    for entry in options.entries:
        results.peers[entry.name] = {
            "title": entry.title,
            "networked": entry.networked,
            "dynamic": entry.dynamic,
            "status": "run",
            "versions": {},
        }
        if not entry.networked and 1 not in options.shards:
            results.peers[entry.name]["status"] = "not run: only beside one shard"
    with tempfile.TemporaryDirectory(prefix="heterps-bench-") as folder:
        batches = Path(folder) / "batches.npz"
        results.distinct = write(options.shape, batches)
        certificates = certs.make(Path(folder) / "certificates", ["127.0.0.1"])
        for dim in options.dims:
            for shards in options.shards:
                setting = Setting(str(batches), dim, shards, str(options.peers_dir))
                with _started(options, setting, results, Path(folder), certificates) as clients:
                    _compare(options, setting, results, clients)
                save(results)
            for entry in options.entries:
                if entry.name in options.growers:
                    one = Setting(str(batches), dim, 1, str(options.peers_dir))
                    _grow(options, one, results, entry, Path(folder))
                    save(results)
    return results


@contextmanager
def _started(
    options: Options,
    setting: Setting,
    results: Results,
    folder: Path,
    certificates: Mapping[str, str],
) -> Iterator[list[ClientProcess]]:
    """Clients with filled tables that were found right; those that fail are left out."""
    clients: list[ClientProcess] = []
    where = {"dim": setting.dim, "shards": setting.shards}
    try:
        for entry in options.entries:
            alone = not entry.networked and setting.shards > 1
            if alone or not _runs_by_name(entry.name, results):
                continue
            with _failing(entry, results, options):
                log = folder / f"{entry.name}.log"
                client = ClientProcess(entry, setting, log, certificates)
                clients.append(client)
                results.peers[entry.name]["versions"] = client.ask("start")["versions"]
                filled = client.ask("fill")
                results.fills.append({"peer": entry.name, **where, **filled})
                found = client.ask("check")
                if found:
                    right = found["error"] <= TOLERANCE
                    check = {"peer": entry.name, **where, **found, "right": right}
                    results.checks.append(check)
                    if not right:
                        raise PeerError(f"rows differ from the reference by {found['error']:.1e}")
                options.say(f"dim {setting.dim}, {setting.shards} shards: {entry.name} is ready")
        yield [client for client in clients if _runs(client, results)]
    finally:
        close_all(clients)


def _compare(
    options: Options, setting: Setting, results: Results, clients: list[ClientProcess]
) -> None:
    for workload in WORKLOADS:
        for op in OPS:
            turns: dict[str, list[Answer]] = {client.entry.name: [] for client in clients}
            modes: dict[str, str] = {}
            for client in clients:
                with _failing(client.entry, results, options):
                    modes[client.entry.name] = client.ask("warm", workload=workload, op=op)["mode"]
            for number in range(options.rounds):
                for client in _rotated(clients, number):
                    if not _runs(client, results):
                        continue
                    with _failing(client.entry, results, options):
                        turn = client.ask(
                            "measure",
                            workload=workload,
                            op=op,
                            seconds=options.round_s,
                            calls=options.calls,
                        )
                        turns[client.entry.name].append(turn)
            for name, taken in turns.items():
                if len(taken) == options.rounds:
                    line = {"peer": name, "dim": setting.dim, "shards": setting.shards}
                    line |= {"workload": workload, "op": op, "mode": modes[name]}
                    line |= summary(taken, turns[OURS], options.shape.ids)
                    results.measurements.append(line)
                    options.say(_line(line))


def summary(turns: list[Answer], ours: list[Answer], ids: int) -> Answer:
    """Figures of one peer from its turns, and our rate over its in the same round."""
    rates = [_rate(turn, ids) for turn in turns]
    latencies = np.concatenate([turn["latencies"] for turn in turns])
    rows = ids * len(latencies)
    ratios = [_rate(mine, ids) / rate for mine, rate in zip(ours, rates, strict=True)]
    return {
        "calls": len(latencies),
        "rows_per_s": statistics.median(rates),
        "p50_s": float(np.percentile(latencies, 50)),
        "p99_s": float(np.percentile(latencies, 99)),
        "client_cpu_s": sum(turn["client_cpu_s"] for turn in turns),
        "server_cpu_s": sum(turn["server_cpu_s"] for turn in turns),
        "client_cpu_us_a_row": 1e6 * sum(turn["client_cpu_s"] for turn in turns) / rows,
        "server_cpu_us_a_row": 1e6 * sum(turn["server_cpu_s"] for turn in turns) / rows,
        "ours_over_it": statistics.median(ratios),
        "rounds": rates,
    }


def sizes(rows: int) -> list[int]:
    """Table sizes up to `rows`: 1e5, 3e5, 1e6 and so on."""
    steps = [10**power * lead for power in range(5, 12) for lead in (1, 3)]
    return [*(step for step in steps if step < rows), rows]


def _grow(options: Options, setting: Setting, results: Results, entry: Entry, folder: Path) -> None:
    """Memory and cost of one peer's table by its size, on one shard."""
    if not _runs_by_name(entry.name, results):
        return
    line: Answer = {"peer": entry.name, "dim": setting.dim, "points": [], "stopped": ""}
    results.growth.append(line)
    with _failing(entry, results, options, only_growth=line):
        client = ClientProcess(entry, setting, folder / f"{entry.name}.log", {})
        try:
            client.ask("start")
            before = client.ask("resident")["bytes"]
            for rows in sizes(options.rows):
                _check_memory(rows, setting.dim, line["points"])
                point = client.ask("grow", timeout_s=1800, rows=rows)
                point["bytes_a_row"] = (point.pop("bytes") - before) / rows
                point["peak_bytes_a_row"] = (point.pop("peak_bytes") - before) / rows
                line["points"].append(point)
                options.say(
                    f"{entry.name}, dim {setting.dim}, {rows:,} rows: "
                    f"{point['bytes_a_row']:.1f} bytes a row, "
                    f"pull {1e9 * point['pull_s_a_row']:.0f} ns a row, "
                    f"push {1e9 * point['push_s_a_row']:.0f} ns a row"
                )
        finally:
            client.close()


def _check_memory(rows: int, dim: int, points: list[Answer]) -> None:
    """Raise PeerError where so many rows may not fit into what is free now."""
    each, held = _MEMORY_FACTOR * dim * 8, 0.0
    if points:
        each = max(each, _PEAK_FACTOR * points[-1]["peak_bytes_a_row"])
        held = points[-1]["rows"] * points[-1]["bytes_a_row"]
    if rows * each - held > available():
        raise PeerError(f"{rows:,} rows may need {rows * each / 1e9:.1f} GB, which is not free")


@contextmanager
def _failing(
    entry: Entry, results: Results, options: Options, only_growth: Answer | None = None
) -> Iterator[None]:
    """Note why a peer did not run; only our own failure ends the benchmark."""
    try:
        yield
    except PeerError as error:
        if only_growth is not None:
            only_growth["stopped"] = str(error)
        elif entry.name == OURS:
            raise PeerError(f"{entry.name}: {error}") from None
        else:
            measured = any(line["peer"] == entry.name for line in results.measurements)
            status = f"{'ended early' if measured else 'not run'}: {error}"
            results.peers[entry.name]["status"] = status
        options.say(f"{entry.name}: not run: {error}")


def _runs(client: ClientProcess, results: Results) -> bool:
    return _runs_by_name(client.entry.name, results)


def _runs_by_name(name: str, results: Results) -> bool:
    return bool(results.peers[name]["status"] == "run")


def _rotated(clients: list[ClientProcess], number: int) -> Iterable[ClientProcess]:
    """Another one first in every round."""
    begin = number % len(clients)
    return [*clients[begin:], *clients[:begin]]


def _rate(turn: Answer, ids: int) -> float:
    return ids * len(turn["latencies"]) / float(sum(turn["latencies"]))


def _line(line: Answer) -> str:
    return (
        f"{line['workload']:8} {line['op']:4} dim {line['dim']:2} x {line['shards']}  "
        f"{line['peer']:15} {line['rows_per_s'] / 1e6:7.2f} M rows/s  "
        f"p50 {1e3 * line['p50_s']:7.1f} ms  p99 {1e3 * line['p99_s']:7.1f} ms  "
        f"ours over it {line['ours_over_it']:.2f}"
    )


def available() -> int:
    """Bytes of memory that are free now."""
    with open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable"))
    return int(line.split()[1]) << 10
