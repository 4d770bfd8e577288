"""Models larger than memory: decoding and large batches with 1/2, 1/4 and 1/8 of a model in memory.

In parts, each of some minutes and each kept in the results file as it is done:

    python -m bench.beyond.shakespeare WORK     a trained model's routing; again, it goes on
    python -m bench.beyond WORK prepare         files of a model of 768 MiB, with that routing
    python -m bench.beyond WORK decode          batch 1, contestants in turns
    python -m bench.beyond WORK ring            large batches, modes in turns, and what `auto` says
    python -m bench.beyond WORK memory          peaks in a group without a limit
    python -m bench.beyond WORK train           steps of Adam, in memory and out of it in turns
    python -m bench.beyond WORK tables          put into docs/beyond_memory.md

With `--within` no round begins after so many seconds; `--go-on` takes the rounds that are there
already and does the others, of other tokens of the trace, with contestants that begin anew. One
that fails is shown with what it failed of, and its other rounds are not run.
"""

import argparse
import datetime
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.beyond import training
from bench.beyond.contestants import NAMES, PLAIN, Big, as_modules, files
from bench.beyond.shakespeare import EXPERTS, LAYERS
from bench.beyond.tables import put, tables
from bench.beyond.turns import THREADS, Contestant, Disk, can_cap, enter
from bench.pages import DOCS, RESULTS, machine, versions, write
from heterps import pack_experts
from workers.offload.choice.replay import REPLAYED, replay
from workers.offload.choice.trace import read_trace

RIVALS = ("torch mmap", "safetensors mmap", "accelerate")
SHARES = (2, 4, 8)
SIZE = 2 << 20  # bytes of an expert
WARM, ROUNDS, FORWARDS = 64, 6, 12
WARM_RIVALS, FORWARDS_RIVALS = 16, 4  # after which all their memory is in use; they are slow
PAGE = DOCS / "beyond_memory.md"
NOT_RUN = {
    "llama.cpp": "not tried: its wheel is built from source",
    "deepspeed": "not tried: its NVMe offload wants CUDA and libaio; this machine has no GPU",
}


def prepare(work: Path) -> None:
    """Write each contestant's files."""
    from accelerate.utils import offload_state_dict
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model, at = Big().eval(), files(work)
    state = model.state_dict()
    experts = {key: one for key, one in state.items() if key.endswith(("w1", "w2"))}
    torch.save({key: one for key, one in state.items() if key not in experts}, at["dense"])
    torch.save(experts, at["torch mmap"])
    save_file(experts, at["safetensors mmap"])
    pack_experts(model, at["heterps"])
    offload_state_dict(at["accelerate"], as_modules(experts))


@dataclass(frozen=True, slots=True)
class Sitting:
    """What is to be done now.

    rounds: of all, those of earlier sittings too.
    until: no round begins after that, by time.monotonic.
    keep: called with the results so far after each round.
    """

    work: Path
    rounds: int
    until: float
    keep: Callable[[], None]

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until


def decode(sitting: Sitting, shares: list[int], found: dict[str, Any]) -> bool:
    """Batch 1: of each share of the model, every contestant's turns; whether all are there."""
    for share in shares:
        names = ("resident", "cache", PLAIN, *RIVALS)
        one = found.setdefault(str(share), {"turns": {name: [] for name in names}, "replayed": {}})
        if not _decode(sitting, share, one):
            return False
    return True


def _decode(sitting: Sitting, share: int, one: dict[str, Any]) -> bool:
    slots, turns = LAYERS * EXPERTS // share, one["turns"]
    done = len(turns["resident"])
    if done >= sitting.rounds:
        return True
    if sitting.is_over:
        return False
    # Other tokens than those of earlier sittings.
    first = done * (WARM + FORWARDS)
    disk = Disk(sitting.work)
    later = dict.fromkeys(RIVALS, first + WARM - WARM_RIVALS)
    field = enter(list(turns), sitting.work, slots * SIZE, first=first, later=later)
    one["slots"], one["threads"] = slots, THREADS
    one["resident_pages"] = {name: each.resident_before for name, each in field.items()}
    for name, each in field.items():
        each.run(WARM_RIVALS if name in RIVALS else WARM)
    trace = read_trace(sitting.work / "shakespeare.trace")
    begin, ran = LAYERS * first, 0
    while done + ran < sitting.rounds and not (ran and sitting.is_over):
        for name, each in field.items():
            if name in RIVALS:
                turns[name].append(each.run(FORWARDS_RIVALS))
            else:
                turns[name].append(_turn(each, disk, FORWARDS))
        ran += 1
        sitting.keep()
    for each in field.values():
        each.close()
    # Of this sitting's calls, from the first, for Belady's choice knows what comes.
    part = replace(trace, calls=trace.calls[begin : begin + LAYERS * (WARM + ran * FORWARDS)])
    for policy in REPLAYED:
        missed = replay(part, slots, policy, after=LAYERS * WARM).misses
        one["replayed"][policy] = one["replayed"].get(policy, 0) + missed
    sitting.keep()
    return done + ran >= sitting.rounds


def _turn(one: Contestant, disk: Disk, forwards: int) -> dict[str, Any]:
    """A contestant's forwards, and the disk's speed before and after them."""
    before = disk.speed(0.2)
    told = one.run(forwards)
    told["disk"] = [before, disk.speed(0.2)]
    return told


def ring(sitting: Sitting, shares: list[int], batches: list[int], found: dict[str, Any]) -> bool:
    """Large batches: both modes in turns, what was expected of them, and the bound."""
    names = ("resident", "cache", "ring")
    for batch in batches:
        for share in shares:
            one = found.setdefault(
                f"{batch}/{share}",
                {"batch": batch, "share": share, "turns": {name: [] for name in names}},
            )
            if not _ring(sitting, one):
                return False
    return True


def _ring(sitting: Sitting, one: dict[str, Any]) -> bool:
    batch, turns = one["batch"], one["turns"]
    done = len(turns["resident"])
    if done >= sitting.rounds:
        return True
    if sitting.is_over:
        return False
    disk, memory = Disk(sitting.work), LAYERS * EXPERTS // one["share"] * SIZE
    auto = Contestant("auto", sitting.work, memory, batch)
    auto.ready()
    one["threads"] = THREADS
    one["auto"], one["expected"] = auto.said.get("mode"), auto.said.get("expected", [])
    auto.close()
    field = enter(list(turns), sitting.work, memory, batch)
    for each in field.values():
        each.run(2)
    ran = 0
    while done + ran < sitting.rounds and not (ran and sitting.is_over):
        for name, each in field.items():
            turns[name].append(_turn(each, disk, max(1, FORWARDS // batch)))
        ran += 1
        sitting.keep()
    for each in field.values():
        each.close()
    return done + ran >= sitting.rounds


def memory(sitting: Sitting, found: dict[str, Any]) -> bool:
    """The peak of all memory, page cache included, of groups without a limit."""
    for name, batch in (("cache", 1), ("ring", 64)):
        for share in SHARES:
            if f"{name}/{share}" in found:
                continue
            if sitting.is_over:
                return False
            allowed = LAYERS * EXPERTS // share * SIZE
            one = Contestant(name, sitting.work, allowed, batch, unlimited=True)
            one.ready()
            told = one.run(40 if batch == 1 else 4)
            one.close()
            kept = {key: told[key] for key in ("peak", "failed") if key in told}
            found[f"{name}/{share}"] = {"memory": allowed} | kept
            sitting.keep()
    return True


def train(sitting: Sitting, found: dict[str, Any]) -> bool:
    """Steps of Adam; of an earlier sitting nothing is kept."""
    found |= training.rounds(sitting.work, sitting.rounds, lambda: sitting.is_over)
    sitting.keep()
    return len(found["rounds"]) >= sitting.rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("part", choices=["prepare", "decode", "ring", "memory", "train", "tables"])
    parser.add_argument("--shares", type=int, nargs="+", default=list(SHARES))
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds")
    parser.add_argument("--go-on", action="store_true", help="from the rounds that are there")
    parser.add_argument("--json", type=Path, default=RESULTS / "beyond.json")
    options = parser.parse_args()
    until = time.monotonic() + options.within
    if options.part == "prepare":
        prepare(options.work)
        return 0
    result: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.part == "tables":
        write(PAGE, put(PAGE.read_text(), result))
        return 0
    result |= {
        "benchmark": "beyond",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch", "safetensors", "accelerate"),
        "model_bytes": LAYERS * EXPERTS * SIZE,
        "capped": can_cap(),
        "contestants": [*NAMES],
        "not_run": NOT_RUN,
    }
    found = result.setdefault(options.part, {})
    if not options.go_on:
        for key in _keys(options):
            found.pop(key, None)
    sitting = Sitting(options.work, options.rounds, until, lambda: _keep(options.json, result))
    if options.part == "decode":
        whole = decode(sitting, options.shares, found)
    elif options.part == "ring":
        whole = ring(sitting, options.shares, options.batches, found)
    elif options.part == "train":
        whole = train(sitting, found)
    else:
        whole = memory(sitting, found)
    print(tables(result) + ("" if whole else "\nthe time is over: --go-on"))
    return 0 if whole else 1


def _keys(options: argparse.Namespace) -> list[str]:
    """Of the results that are to be measured anew."""
    shares = [str(share) for share in options.shares]
    if options.part == "ring":
        return [f"{batch}/{share}" for batch in options.batches for share in shares]
    return shares if options.part == "decode" else [f"{a}/{b}" for a in NAMES for b in shares]


def _keep(path: Path, result: dict[str, Any]) -> None:
    write(path, json.dumps(result) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
