"""Tables beyond memory beside key-value stores: an eighth of the table in memory.

Each contestant is a process in a control group of its own, whose cap is that eighth and what its
process had before, page cache included. All do the same steps in turns: distinct keys of a Zipf
law, their rows, Adagrad, the rows written. Rows of each are compared with what NumPy makes of them.
At last ours goes on until 20 times the table was updated: what was written, and how large it is.

    python -m bench.ssd WORK [--dims 16 64] [--rounds 6] [--within SECONDS] [--json FILE]
    python -m bench.ssd WORK --aged         # the last part alone, into the results that are there
"""

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.beyond.turns import can_cap
from bench.pages import RESULTS, machine, versions, write
from bench.ssd.contestants import CONTESTANTS
from bench.ssd.device import Device
from bench.ssd.processes import BESIDE, MEMORY, Process, child
from bench.ssd.steps import SHARE, TABLE, ZIPF, Steps, count_of, row_bytes

AGED = 20  # times the table, updated in all
WARM = 10.0  # seconds of each before its turns


def measure(work: Path, dim: int, rounds: int, seconds: float, within: float) -> dict[str, Any]:
    """Turns of all contestants with rows of a width."""
    until = time.monotonic() + within
    found: dict[str, Any] = {"rows": count_of(dim), "turns": {}, "filled": {}}
    found["reads_a_second"] = []  # of each round: the disk is not always as fast
    field, device = {}, Device(work, TABLE)
    updated = 0
    try:
        for name in CONTESTANTS:  # one after the other: filling is no turn
            field[name] = Process(name, work, dim)
            found["filled"][name] = field[name].hear()
            warmed = field[name].run(WARM)  # until memory is as it stays
            updated += warmed.get("rows", 0) if name == "ours" else 0
        for _ in range(rounds):
            found["reads_a_second"].append(device.reads(1.0))
            for name, one in field.items():
                turn = one.run(seconds)
                found["turns"].setdefault(name, []).append(turn)
                updated += turn.get("rows", 0) if name == "ours" else 0
            if time.monotonic() > until:
                break
        for name, one in field.items():
            if name != "ours":
                one.close()
        left = max(seconds, until - time.monotonic())
        aged = field["ours"].run(left, max(1, AGED * count_of(dim) - updated))
        found["aged"] = {**aged, "tables": (updated + aged.get("rows", 0)) / count_of(dim)}
    finally:
        for one in field.values():
            one.close()
        device.close()
    _compare(found, Steps(dim))
    return found


def age(work: Path, dim: int) -> dict[str, Any]:
    """Ours alone, until the table was updated so often; without a cap, as time is not looked at."""
    ours = Process("ours", work, dim, capped=False)
    try:
        ours.hear()
        aged = ours.run(float("inf"), AGED * count_of(dim))
    finally:
        ours.close()
    found = {"turns": {}, "aged": {**aged, "tables": aged.get("rows", 0) / count_of(dim)}}
    _compare(found, Steps(dim))
    return found["aged"]


def _compare(found: dict[str, Any], steps: Steps) -> None:
    """Whether rows of each are what NumPy makes of the same steps."""
    for turns in (*found["turns"].values(), [found["aged"]]):
        last = turns[-1]
        if "some" in last:
            rows = np.array(last["some"], np.float32)
            last["equal"] = bool(np.allclose(rows, steps.after(last["steps"]), 1e-4, 1e-5))
        for turn in turns:
            turn.pop("some", None)


def rate(turns: list[dict[str, Any]]) -> float:
    """Rows a second, of the median turn; zero where one failed."""
    return statistics.median(t["rows"] / t["seconds"] if t.get("rows") else 0.0 for t in turns)


def share(one: dict[str, Any], name: str) -> float:
    """Of what is less: its rate with all in memory, or with reads of a page for cold rows alone.

    The median of rounds, each by what the disk gave in it.
    """
    found = []
    for turn, reads in zip(one["turns"][name], one["reads_a_second"], strict=True):
        if not turn.get("rows"):
            return 0.0
        allowed = reads * turn["rows"] / max(1, turn["promoted"])
        found.append(turn["rows"] / turn["seconds"] / min(allowed, rate(one["turns"][MEMORY])))
    return statistics.median(found)


def table(result: dict[str, Any]) -> str:
    """As Markdown."""
    names = ", ".join(CONTESTANTS)
    lines = [
        f"| dim | rows | rows/s: {names.replace(', ahead', ' with look-ahead')} | over the better "
        "store | of min(in memory, disk): ours, with look-ahead | written / updated | space / live "
        "| rows |",
        "| --- " * 8 + "|",
    ]
    for dim, one in result["dims"].items():
        rates = {name: rate(turns) for name, turns in one["turns"].items()}
        best = max(rates["rocksdict"], rates["lmdb"]) or float("nan")
        shares = [f"{share(one, name):.0%}" for name in ("ours", "ours, ahead")]
        aged, live = one["aged"], one["rows"] * row_bytes(int(dim))
        wrong = [n for n, turns in one["turns"].items() if not turns[-1].get("equal")]
        wrong += [] if aged.get("equal") else ["ours at last"]
        grown = "failed | failed"
        if aged.get("updated"):
            grown = (
                f"{aged['written'] / aged['updated']:.2f} | {aged['space'] / live:.2f} "
                f"(after {aged['tables']:.0f} tables)"
            )
        lines.append(
            f"| {dim} | {one['rows']:,} | "
            + ", ".join(f"{rates[name]:,.0f}" if rates[name] else "failed" for name in CONTESTANTS)
            + f" | **{rates['ours'] / best:.1f} x** | {', '.join(shares)} | {grown} | "
            + (f"not of {', '.join(wrong)}" if wrong else "equal")
            + " |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--within", type=float, default=230.0, help="seconds for each width")
    parser.add_argument("--json", type=Path, default=RESULTS / "ssd.json")
    parser.add_argument("--aged", action="store_true", help="only what many updates lead to")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--group", default="-", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, options.work, options.dims[0], options.group)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.aged:
        result = json.loads(options.json.read_text())
        for dim in options.dims:
            result["dims"][str(dim)]["aged"] = age(options.work, dim)
            write(options.json, json.dumps(result, indent=1) + "\n")
        print(table(result))
        return 0
    result = {
        "benchmark": "ssd",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("numpy", "rocksdict", "lmdb"),
        "capped": can_cap(),
        "table_bytes": TABLE,
        "cap_bytes": TABLE // SHARE,
        "memory_bytes": TABLE // SHARE - BESIDE,
        "zipf": ZIPF,
        "seconds": options.seconds,
        "dims": {},
    }
    for dim in options.dims:
        result["dims"][str(dim)] = measure(
            options.work, dim, options.rounds, options.seconds, options.within
        )
        write(options.json, json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
