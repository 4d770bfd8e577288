"""The page about training a CTR network, made whole from its results."""

import json
import statistics
from pathlib import Path
from typing import Any

from bench.ctr.roster import ENTRIES, MAIN, OURS, title
from bench.ctr.targets import of_rates, targets
from bench.pages import RESULTS, measured_on, table, write

_SHOWN = (MAIN, "2+2")  # whose ratios stand beside each contestant
_FLIGHTS, _FLIGHTS_AT_ONCE = 1.2, 0.9
_HEAD = """# How fast a CTR network trains

Made by `python -m bench.ctr` from `bench/results/ctr.json`; do not edit. {date}; {machine}.

26 slots over 10 million keys by Zipf's law, rows of 16 with exact Adagrad, dense layers
429-400-400-1 with Adam, batches of {batch:,}. All processes of a contestant share this machine's
cores; two that train have half of each batch. {rounds} rounds, in which all take turns; rates are
medians of them, ratios the medians of the rounds' ratios. HeterPS reads its batches from a file,
the others have them in memory. CPU is that of workers + servers, where
there are servers; 1x2+1 is one worker of two threads and a shard, at staleness 1.

"""
_CHECKS = """## Whether they train the same

Each peer begins with the same rows and layers. Its first {steps} steps are held against NumPy in
double precision: the largest difference of a step's loss; of the rows of {samples} samples the
difference over what training changes, as the median of all and as the norm of the worst slot. A
peer that is further off than {loss:g}, {rows:g} and {slot:g} is not measured.

"""
_TARGETS = """## Targets

Rates are those of {title} unless it says otherwise.

"""


def page(found: dict[str, Any], docs: Path, flights: Path = RESULTS / "train.json") -> Path:
    """Write `train_benchmark.md` from results, and those of the flights job."""
    machine = measured_on(found["machine"], found["versions"])
    settings = found["settings"]
    rounds = len(found["rounds"])
    parts = [
        _HEAD.format(date=found["date"], machine=machine, batch=settings["batch"], rounds=rounds),
        _rates(found),
        _failed(found),
        _TARGETS.format(title=title(MAIN)),
        _targets(found),
        _flights(flights),
        _CHECKS.format(**settings["checked"]),
        _checks(found),
    ]
    return write(docs / "train_benchmark.md", "".join(parts).rstrip("\n") + "\n")


def _rates(found: dict[str, Any]) -> str:
    rounds = found["rounds"]
    lines = []
    for name in [*OURS, *ENTRIES]:
        if not all(name in one for one in rounds):
            continue
        rate = statistics.median(one[name]["samples_per_s"] for one in rounds)
        ratios = [of_rates(rounds, ours, name) for ours in _SHOWN]
        cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append((title(name), f"{rate / 1e3:.1f}", *cells, _cpu(rounds, name)))
    over = [f"HeterPS {ours} over it" for ours in _SHOWN]
    head = ("", "1,000 samples/s", *over, "CPU ms a step")
    return table(head, lines) + "\n"


def _cpu(rounds: list[dict[str, Any]], name: str) -> str:
    parts = []
    for key in ("cpu_s", "server_cpu_s"):
        if all(key in one[name] for one in rounds):
            parts.append(f"{1e3 * statistics.median(one[name][key] for one in rounds):.0f}")
    return " + ".join(parts)


def _failed(found: dict[str, Any]) -> str:
    lines = [f"- {title(name)}: not run: {why}\n" for name, why in found["failed"].items()]
    return "".join(lines) + ("\n" if lines else "")


def _targets(found: dict[str, Any]) -> str:
    lines = []
    for one in targets(found["rounds"]):
        value = "not run" if one["value"] is None else f"{one['value']:.3g}"
        lines.append((one["target"], one["limit"], value, _met(one["met"])))
    return table(("", "limit", "found", ""), lines, texts=2) + "\n"


def _met(met: bool | None) -> str:
    return "" if met is None else "met" if met else "**not met**"


def _flights(path: Path) -> str:
    """What `python -m bench.train` found, where it has."""
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    used = measured_on(found["machine"], found["versions"])
    least = min(one["heterps"] / one["plain"] for one in found["rounds"])
    text = (
        f"The flights job (`python -m bench.train`, {found['date']}; {used}) trains "
        f"{found['ratio']:.2f} times as fast as one process of PyTorch at staleness 1, "
        f"{least:.2f} in the worst of {len(found['rounds'])} rounds; >= {_FLIGHTS:g}: "
        f"{_met(found['ratio'] >= _FLIGHTS)}."
    )
    if "at_once" in found:
        text += (
            f" At staleness 0 it has {found['at_once']:.2f} of that rate; "
            f">= {_FLIGHTS_AT_ONCE:g}: {_met(found['at_once'] >= _FLIGHTS_AT_ONCE)}."
        )
    return text + "\n\n"


def _checks(found: dict[str, Any]) -> str:
    lines = [
        (title(name), *(f"{one[key]:.0e}" for key in ("loss", "rows", "slot")))
        for name, one in found["checks"].items()
    ]
    return table(("", "loss", "rows, median", "rows, norm of a slot"), lines)
