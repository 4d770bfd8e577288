"""The figures of a results file as tables."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from bench.beyond.contestants import PLAIN
from bench.pages import measured_on

BEGIN, END = "<!-- bench.beyond: begin -->", "<!-- bench.beyond: end -->"
RIVALS = ("torch mmap", "safetensors mmap", "accelerate")


def put(page: str, result: Mapping[str, Any]) -> str:
    """A page with the tables between its marks, in place of those that were there."""
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"expected {BEGIN!r} and {END!r} in the page")
    return f"{before}{BEGIN}\n\n{head(result)}\n{tables(result)}\n{end}{after}"


def head(result: Mapping[str, Any]) -> str:
    """What it was measured on, and who was not."""
    without = "; ".join(f"{name}: {why}" for name, why in result["not_run"].items())
    capped = "" if result["capped"] else " Memory was not capped."
    return (
        f"{measured_on(result['machine'], result['versions'])}; a model of "
        f"{result['model_bytes'] / 2**20:.0f} MiB in experts of 2 MiB, {result['date']}.{capped} "
        f"Without figures: {without}.\n"
    )


def tables(result: Mapping[str, Any]) -> str:
    """Markdown."""
    parts = []
    if "decode" in result:
        parts += [_decode(result["decode"]), _bounds(result["decode"]), _hits(result["decode"])]
    if "ring" in result:
        parts.append(_ring(result["ring"]))
    if "memory" in result:
        parts.append(_memory(result["memory"]))
    if result.get("train", {}).get("rounds"):
        parts.append(_train(result["train"]))
    return "\n".join(parts)


def _decode(found: Mapping[str, Any]) -> str:
    rows = []
    for share, one in _by_share(found):
        turns = one["turns"]
        ran = {name: _rate(turns[name]) for name in turns if not _failed(turns[name])}
        rivals = [name for name in RIVALS if name in ran]
        rival = max(rivals, key=lambda name: ran[name]) if rivals and "cache" in ran else None
        every = _every(turns["cache"])
        plain = f"{ran[PLAIN]:.1f}" if PLAIN in ran else ""
        rows.append(
            [
                _label(share, one),
                *(
                    f"{ran[name]:.1f}" if name in ran else f"failed: {_failed(turns[name])}"
                    for name in ("cache", *RIVALS, "resident")
                ),
                plain,
                f"**{_ratio(turns, rival):.1f} ×** ({rival})" if rival else "",
                f"{1e3 * _quantile(every, 0.5):.0f} / {1e3 * _quantile(every, 0.99):.0f}"
                if every
                else "",
                _bits(turns, ("cache", *(name for name in turns if name == PLAIN))),
            ]
        )
    head = [
        "memory / model",
        "ours, tokens/s",
        *RIVALS,
        "resident",
        "ours, nothing ahead",
        "over the best rival",
    ]
    return _table([*head, "p50 / p99 ms", "bits"], rows)


def _bounds(found: Mapping[str, Any]) -> str:
    rows = []
    for share, one in _by_share(found):
        shares, computing, reading, speeds = [], [], [], []
        for ours, resident in _pairs(one["turns"], "cache"):
            tokens = len(ours["seconds"])
            compute = sum(resident["seconds"]) / tokens
            speed = statistics.mean(ours["disk"])
            missed = ours["stats"]["bytes_read"] - ours["stats"]["bytes_wasted"]
            read = missed / tokens / speed
            taken = sum(ours["seconds"]) / tokens
            shares.append(max(compute, read) / taken)
            # What was not waited for a read: computing, and all bookkeeping.
            computing.append(compute / (taken - ours["stats"]["waited"] / tokens))
            reading.append(1 - ours["stats"]["disk_busy"] / sum(ours["seconds"]))
            speeds.append(speed / 1e6)
        if shares:
            rows.append(
                [
                    _label(share, one),
                    f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})",
                    f"{statistics.median(computing):.0%}",
                    f"{statistics.median(reading):.0%}",
                    f"{statistics.median(speeds):.0f} ({min(speeds):.0f} to {max(speeds):.0f})",
                ]
            )
    head = ["memory / model", "of max(compute, missed bytes / bandwidth)"]
    return _table([*head, "compute beside resident", "disk idle", "disk, MB/s"], rows)


def _hits(found: Mapping[str, Any]) -> str:
    rows, policies = [], []
    for share, one in _by_share(found):
        stats = [turn["stats"] for turn in one["turns"]["cache"] if "stats" in turn]
        hits, misses = (sum(each[key] for each in stats) for key in ("hits", "misses"))
        replayed = one["replayed"]
        policies = list(replayed)
        # Missed by the run; beside it what other policies had missed on the same calls.
        rows.append(
            [
                _label(share, one),
                f"{misses} of {hits + misses}",
                *(str(replayed[policy]) for policy in policies),
            ]
        )
    return _table(["memory / model", "misses of the run", *policies], rows)


def _ring(found: Mapping[str, Any]) -> str:
    rows = []
    for one in found.values():
        medians = {
            name: statistics.median(_every(turns))
            for name, turns in one["turns"].items()
            if turns and not _failed(turns)
        }
        if not {"ring", "cache", "resident"} <= medians.keys():
            failed = {name: why for name, turns in one["turns"].items() if (why := _failed(turns))}
            why = "; ".join(f"{name} failed: {text}" for name, text in failed.items())
            rows.append([str(one["batch"]), f"1/{one['share']}", why, *[""] * 6])
            continue
        shares = []
        for ours, resident in _pairs(one["turns"], "ring"):
            read = ours["stats"]["bytes_read"] / statistics.mean(ours["disk"])
            taken, least = sum(ours["seconds"]), sum(resident["seconds"])
            shares.append(max(read, least) / taken)
        better = min(("cache", "ring"), key=lambda name: medians[name])
        expected = {each["mode"]: each["seconds"] for each in one["expected"]}
        rows.append(
            [
                str(one["batch"]),
                _label(str(one["share"]), one),
                *(f"{1e3 * medians[name]:.0f}" for name in ("ring", "cache", "resident")),
                f"{statistics.median(shares):.0%}",
                f"{one['auto']}, {medians[one['auto']] / medians[better] - 1:.0%} off the better",
                f"{1e3 * expected['ring']:.0f} / {1e3 * expected['cache']:.0f}",
                _bits(one["turns"], ("cache", "ring")),
            ]
        )
    head = ["batch", "memory / model", "ring, ms", "cache, ms", "resident, ms"]
    more = ["ring, of its bound", "`auto` chose", "expected ring / cache, ms", "bits"]
    return _table([*head, *more], rows)


def _memory(found: Mapping[str, Any]) -> str:
    rows = [[key, f"{one['memory'] / 2**20:.0f}", _over(one)] for key, one in found.items()]
    return _table(["mode / share", "memory, MiB", "peak over it, MiB"], rows)


def _train(found: Mapping[str, Any]) -> str:
    shares, seconds, theirs, moved = [], [], [], []
    for one in found["rounds"]:
        reading = one["read"] / statistics.mean(one["disk"])
        writing = one["written"] / statistics.mean(one["disk_writes"])
        shares.append(max(one["resident"], reading + writing) / one["seconds"])
        seconds.append(one["seconds"])
        theirs.append(one["resident"])
        moved.append(f"{one['read'] / 1e6:.0f} / {one['written'] / 1e6:.0f}")
    row = [
        f"{found['memory'] / 2**20:.0f}",
        str(found["batch"]),
        f"{statistics.median(seconds):.2f}",
        f"{statistics.median(theirs):.2f}",
        moved[-1],
        f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})",
        "equal" if found["equal"] else "different",
    ]
    head = ["memory, MiB", "batch", "step, s", "in memory, s", "MB read / written a step"]
    more = ["of max(compute, bytes / bandwidth)", "weights"]
    return _table([*head, *more], [row])


def _over(one: Mapping[str, Any]) -> str:
    if "failed" in one:
        return f"failed: {one['failed']}"
    return f"{(one['peak'] - one['memory']) / 2**20:+.1f}"


def _by_share(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(found.items(), key=lambda item: int(item[0]))


def _label(share: str, one: Mapping[str, Any]) -> str:
    """What was measured, and by how much."""
    rounds = len(one["turns"]["resident"])
    return f"1/{share}, threads {one['threads']}, rounds {rounds}"


def _failed(turns: Iterable[Mapping[str, Any]]) -> str:
    """What a contestant failed of in any of its turns; nothing if in none."""
    return next((str(one["failed"]) for one in turns if "failed" in one), "")


def _pairs(turns: Mapping[str, list[Any]], name: str) -> list[tuple[Any, Any]]:
    """Its turns and the resident model's of the same rounds, in which neither failed."""
    pairs = zip(turns[name], turns["resident"], strict=True)
    return [pair for pair in pairs if not _failed(pair)]


def _bits(turns: Mapping[str, list[Any]], names: Iterable[str]) -> str:
    """Whether these gave the resident model's outputs in all rounds."""
    pairs = [pair for name in names for pair in _pairs(turns, name)]
    if not pairs:
        return "not compared"
    return "equal" if all(a["digest"] == b["digest"] for a, b in pairs) else "different"


def _ratio(turns: Mapping[str, list[dict[str, Any]]], rival: str) -> float:
    """The median of rounds of one's seconds over ours."""
    pairs = zip(turns[rival], turns["cache"], strict=True)
    return statistics.median(_taken(theirs) / _taken(ours) for theirs, ours in pairs)


def _taken(turn: Mapping[str, Any]) -> float:
    return float(sum(turn["seconds"]) / len(turn["seconds"]))


def _rate(turns: Iterable[Mapping[str, Any]]) -> float:
    return 1 / statistics.median(map(_taken, turns))


def _every(turns: Iterable[Mapping[str, Any]]) -> list[float]:
    return [seconds for one in turns for seconds in one.get("seconds", ())]


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
