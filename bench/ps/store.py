"""The results of the parameter-server benchmark as one file, and what it was meant to reach."""

import datetime
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.pages import machine, write
from bench.ps.roster import CEILING, ENTRIES, GRPC, LOCAL, OURS, TLS, TLS_CEILING
from bench.ps.runs import OPS, Options, Results

_FAR = (100_000_000, 1_000_000_000)
_LEAST_ROWS = 1_000_000  # below it tables are in the processor's caches
_BYTES_A_ROW = 150.0
_TLS_LEAST = 0.9  # of rows that are small beside what finding them takes
_LISTS = ("fills", "checks", "measurements", "growth", "targets")


def save(path: Path, results: Results, options: Options) -> None:
    """Write the file whole, one line for each measurement."""
    found = asdict(results)
    for line in found["growth"]:
        line["model"] = fitted(line["points"])
    whole = {
        "benchmark": "ps",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": results.peers[OURS]["versions"],
        "settings": _settings(options),
        "distinct": results.distinct,
        "peers": results.peers,
        **found,
        "targets": list(targets(found)),
    }
    parts = []
    for key, value in whole.items():
        if key in _LISTS:
            lines = ",\n".join(f"  {json.dumps(line)}" for line in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            text = json.dumps(value, indent=1).replace("\n", "\n ")
            parts.append(f" {json.dumps(key)}: {text}")
    write(path, "{\n" + ",\n".join(parts) + "\n}\n")


def fitted(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Cost of a row as a + b log10(rows), by least squares; what it comes to for larger tables.

    A larger table misses more caches and address translations, and each level adds its share as
    the table outgrows it: about a straight line over the logarithm of the size.
    """
    some = [point for point in points if point["rows"] >= _LEAST_ROWS]
    if len(some) < 2:
        return {}
    x = np.log10([point["rows"] for point in some])
    model: dict[str, Any] = {"from_rows": some[0]["rows"]}
    for op in ("pull", "push"):
        b, a = np.polyfit(x, [1e9 * point[f"{op}_s_a_row"] for point in some], 1)
        model[op] = {"a_ns": float(a), "b_ns": float(b)}
        model[op]["at"] = {f"{rows:.0e}": float(a + b * np.log10(rows)) for rows in _FAR}
    return model


def targets(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What is to be reached, what was, and whether that is enough.

    Of several peers the best counts: where some did not run nothing is met, as it may be theirs.
    """
    lines = found["measurements"]
    rivals = [
        entry
        for entry in ENTRIES
        if entry.networked and entry.name not in (OURS, GRPC, LOCAL, TLS, CEILING, TLS_CEILING)
    ]
    dynamic = [entry.name for entry in rivals if entry.dynamic]
    everybody = [entry.name for entry in rivals]
    clear = (
        ("pull, over the best networked peer with any keys", dynamic, ("pull",), "zipf", 2.0),
        ("push, over the best networked peer with any keys", dynamic, ("push",), "zipf", 3.0),
        ("least over any networked peer", everybody, OPS, "zipf", 1.0),
        ("least over any networked peer, distinct keys", everybody, OPS, "distinct", 1.0),
        ("pull, over the raw echo", [CEILING], ("pull",), "zipf", 1.0),
        ("pull of distinct keys, over the raw echo", [CEILING], ("pull",), "distinct", 1.2),
    )
    for who in (OURS, LOCAL, TLS):
        for dim, shards in sorted({(line["dim"], line["shards"]) for line in lines}):
            mine = [line for line in lines if (line["dim"], line["shards"]) == (dim, shards)]
            if who != OURS and all(line["peer"] != who for line in mine):
                continue
            secret = ("pull, over the echo with TLS", [TLS_CEILING], ("pull",), "zipf")
            asked = clear if who != TLS else ((*secret, _TLS_LEAST if dim <= 16 else 1.0),)
            for text, names, ops, workload, limit in asked:
                value, missing = _least(mine, who, names, ops, workload)
                enough = value is not None and value >= limit
                met = None if value is None or (enough and missing) else enough
                target = _target(f"`{who}`: {text}", dim, shards, f">= {limit:g}", value, met)
                yield target | {"missing": missing}
    for line in found["growth"]:
        if line["peer"] == OURS and line["dim"] == 16 and line["points"]:
            point = line["points"][-1]
            text = f"`{OURS}`: server bytes a row at {point['rows']:,} rows, exact Adagrad"
            value = point["bytes_a_row"]
            yield _target(text, 16, 1, f"<= {_BYTES_A_ROW:g}", value, value <= _BYTES_A_ROW)


def _least(
    lines: Sequence[Mapping[str, Any]],
    who: str,
    names: Sequence[str],
    ops: Sequence[str],
    workload: str,
) -> tuple[float | None, list[str]]:
    """The least ratio of `who` over those named, each the median of the rounds' ratios.

    And those of them that were not measured.
    """
    ratios, missing = [], set()
    for op in ops:
        of = {x["peer"]: x for x in lines if (x["op"], x["workload"]) == (op, workload)}
        for name in names:
            if name in of and who in of:
                pairs = zip(of[who]["rounds"], of[name]["rounds"], strict=True)
                ratios.append(statistics.median(ours / its for ours, its in pairs))
            else:
                missing.add(name)
    return min(ratios, default=None), sorted(missing)


def _target(
    text: str, dim: int, shards: int, limit: str, value: float | None, met: bool | None
) -> dict[str, Any]:
    where = {"dim": dim, "shards": shards}
    return {"target": text, **where, "limit": limit, "value": value, "met": met}


def _settings(options: Options) -> dict[str, Any]:
    return {
        **asdict(options.shape),
        "ids": options.shape.ids,
        "dims": options.dims,
        "shards": options.shards,
        "rounds": options.rounds,
        "round_s": options.round_s,
        "calls": options.calls,
        "rows": options.rows,
    }
