"""The figures of a results file as tables."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

RIVALS = ("torch mmap", "safetensors mmap", "accelerate")


def tables(result: Mapping[str, Any]) -> str:
    """Markdown."""
    parts = []
    if "decode" in result:
        parts += [_decode(result["decode"]), _bounds(result["decode"]), _hits(result["decode"])]
    if "ring" in result:
        parts.append(_ring(result["ring"]))
    if "memory" in result:
        parts.append(_memory(result["memory"]))
    return "\n".join(parts)


def _decode(found: Mapping[str, Any]) -> str:
    rows = []
    for share, one in sorted(found.items(), key=lambda item: int(item[0])):
        speeds = {name: _rate(turns) for name, turns in one["turns"].items()}
        rival = max(RIVALS, key=lambda name: speeds[name])
        every = _every(one["turns"]["cache"])
        equal = all(
            ours["digest"] == theirs["digest"]
            for ours, theirs in zip(one["turns"]["cache"], one["turns"]["resident"], strict=True)
        )
        rows.append(
            [
                f"1/{share}",
                f"{speeds['cache']:.1f}",
                *(f"{speeds[name]:.1f}" for name in RIVALS),
                f"{speeds['resident']:.1f}",
                f"**{_ratio(one['turns'], rival):.1f} ×** ({rival})",
                f"{1e3 * _quantile(every, 0.5):.0f} / {1e3 * _quantile(every, 0.99):.0f}",
                "equal" if equal else "different",
            ]
        )
    head = ["memory / model", "ours, tokens/s", *RIVALS, "resident", "over the best rival"]
    return _table([*head, "p50 / p99 ms", "bits"], rows)


def _bounds(found: Mapping[str, Any]) -> str:
    rows = []
    for share, one in sorted(found.items(), key=lambda item: int(item[0])):
        shares, computing, reading, speeds = [], [], [], []
        for ours, resident in zip(one["turns"]["cache"], one["turns"]["resident"], strict=True):
            tokens = len(ours["seconds"])
            compute = sum(resident["seconds"]) / tokens
            speed = statistics.mean(ours["disk"])
            read = ours["stats"]["bytes_read"] / tokens / speed
            taken = sum(ours["seconds"]) / tokens
            shares.append(max(compute, read) / taken)
            # What was not waited for a read: computing, and all bookkeeping.
            computing.append(compute / (taken - ours["stats"]["waited"] / tokens))
            reading.append(1 - ours["stats"]["disk_busy"] / sum(ours["seconds"]))
            speeds.append(speed / 1e6)
        rows.append(
            [
                f"1/{share}",
                f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})",
                f"{statistics.median(computing):.0%}",
                f"{statistics.median(reading):.0%}",
                f"{statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})",
            ]
        )
    head = ["memory / model", "of max(compute, missed bytes / bandwidth)"]
    return _table([*head, "compute beside resident", "disk idle", "disk, MB/s"], rows)


def _hits(found: Mapping[str, Any]) -> str:
    rows = []
    for share, one in sorted(found.items(), key=lambda item: int(item[0])):
        stats = [turn["stats"] for turn in one["turns"]["cache"]]
        hits, misses = (sum(each[key] for each in stats) for key in ("hits", "misses"))
        replayed = one["replayed"]
        rows.append(
            [
                f"1/{share}",
                f"{hits / (hits + misses):.1%}",
                *(f"{replayed[policy]['hit_rate']:.1%}" for policy in replayed),
            ]
        )
    policies = list(next(iter(found.values()))["replayed"])
    return _table(["memory / model", "hit rate of the run", *policies], rows)


def _ring(found: Mapping[str, Any]) -> str:
    rows = []
    for one in found.values():
        medians = {
            name: statistics.median(_every(turns)) for name, turns in one["turns"].items() if turns
        }
        shares = []
        for ours, resident in zip(one["turns"]["ring"], one["turns"]["resident"], strict=True):
            read = ours["stats"]["bytes_read"] / statistics.mean(ours["disk"])
            taken, least = sum(ours["seconds"]), sum(resident["seconds"])
            shares.append(max(read, least) / taken)
        better = min(("cache", "ring"), key=lambda name: medians[name])
        expected = {each["mode"]: each["seconds"] for each in one["expected"]}
        equal = all(
            ours["digest"] == theirs["digest"]
            for name in ("cache", "ring")
            for ours, theirs in zip(one["turns"][name], one["turns"]["resident"], strict=True)
        )
        rows.append(
            [
                str(one["batch"]),
                f"1/{one['share']}",
                *(f"{1e3 * medians[name]:.0f}" for name in ("ring", "cache", "resident")),
                f"{statistics.median(shares):.0%}",
                f"{one['auto']}, {medians[one['auto']] / medians[better] - 1:.0%} off the better",
                f"{1e3 * expected['ring']:.0f} / {1e3 * expected['cache']:.0f}",
                "equal" if equal else "different",
            ]
        )
    head = ["batch", "memory / model", "ring, ms", "cache, ms", "resident, ms"]
    more = ["ring, of its bound", "`auto` chose", "expected ring / cache, ms", "bits"]
    return _table([*head, *more], rows)


def _memory(found: Mapping[str, Any]) -> str:
    rows = [
        [key, f"{one['memory'] / 2**20:.0f}", f"{(one['peak'] - one['memory']) / 2**20:+.1f}"]
        for key, one in found.items()
    ]
    return _table(["mode / share", "memory, MiB", "peak over it, MiB"], rows)


def _ratio(turns: Mapping[str, list[dict[str, Any]]], rival: str) -> float:
    """The median of rounds of one's seconds over ours."""
    pairs = zip(turns[rival], turns["cache"], strict=True)
    return float(
        statistics.median(
            sum(theirs["seconds"])
            / len(theirs["seconds"])
            / (sum(o["seconds"]) / len(o["seconds"]))
            for theirs, o in pairs
        )
    )


def _rate(turns: Iterable[Mapping[str, Any]]) -> float:
    taken = (sum(one["seconds"]) / len(one["seconds"]) for one in turns)
    return 1 / float(statistics.median(taken))


def _every(turns: Iterable[Mapping[str, Any]]) -> list[float]:
    return [seconds for one in turns for seconds in one["seconds"]]


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
