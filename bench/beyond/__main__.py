"""Models larger than memory: decoding and large batches with 1/2, 1/4 and 1/8 of a model in memory.

In parts, each of some minutes and each kept in the results file as it is done:

    python -m bench.beyond.shakespeare WORK     a trained model's routing; again, it goes on
    python -m bench.beyond WORK prepare         files of a model of 768 MiB, with that routing
    python -m bench.beyond WORK decode          batch 1, contestants in turns
    python -m bench.beyond WORK ring            large batches, modes in turns, and what `auto` says
    python -m bench.beyond WORK memory          peaks in a group without a limit
    python -m bench.beyond WORK tables          what docs/beyond_memory.md shows
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import torch

from bench.beyond.contestants import NAMES, Big, as_modules, files
from bench.beyond.shakespeare import EXPERTS, LAYERS
from bench.beyond.tables import tables
from bench.beyond.turns import Contestant, Disk, can_cap, enter
from bench.pages import RESULTS, machine, versions, write
from heterps import pack_experts
from workers.offload.replay import REPLAYED, replay
from workers.offload.trace import read_trace

RIVALS = ("torch mmap", "safetensors mmap", "accelerate")
SHARES = (2, 4, 8)
SIZE = 2 << 20  # bytes of an expert
WARM, ROUNDS, FORWARDS = 64, 6, 12
NOT_RUN = {
    "llama.cpp": "its wheel is built from source, which takes longer than the whole benchmark",
    "deepspeed": "its NVMe offload wants CUDA and libaio; this machine has no GPU",
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


def decode(work: Path, shares: list[int], rounds: int) -> dict[str, Any]:
    """Batch 1: of each share of the model, every contestant's turns."""
    found = {}
    for share in shares:
        found[str(share)] = _decode(work, share, rounds)
    return found


def _decode(work: Path, share: int, rounds: int) -> dict[str, Any]:
    slots = LAYERS * EXPERTS // share
    disk = Disk(work)
    names = ("resident", "cache", *RIVALS)
    field = enter(names, work, slots * SIZE)
    dirty = {name: one.resident_before for name, one in field.items()}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for name, one in field.items():
        one.run(WARM if name in ("cache", "resident") else WARM // 2)
    # The rivals' caches are full before half of this; what they run is then the same for all.
    for name, one in field.items():
        if name not in ("cache", "resident"):
            one.run(WARM - WARM // 2)
    for _ in range(rounds):
        for name, one in field.items():
            before = disk.speed(0.2)
            told = one.run(FORWARDS)
            told["disk"] = [before, disk.speed(0.2)]
            turns[name].append(told)
    for one in field.values():
        one.close()
    trace = read_trace(work / "shakespeare.trace")
    part = type(trace)(trace.layers, trace.calls[: LAYERS * (WARM + rounds * FORWARDS)])
    replayed = {}
    for policy in REPLAYED:
        outcome = replay(part, slots, policy, after=LAYERS * WARM)
        replayed[policy] = {"hit_rate": outcome.hit_rate, "misses": outcome.misses}
    return {"slots": slots, "resident_pages": dirty, "turns": turns, "replayed": replayed}


def ring(work: Path, shares: list[int], batches: list[int], rounds: int) -> dict[str, Any]:
    """Large batches: both modes in turns, what was expected of them, and the bound."""
    found: dict[str, Any] = {}
    disk = Disk(work)
    for batch in batches:
        for share in shares:
            memory = LAYERS * EXPERTS // share * SIZE
            names = ("resident", "cache", "ring", "auto")
            field = enter(names, work, memory, batch)
            turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for one in field.values():
                one.run(2)
            for _ in range(rounds):
                for name, one in field.items():
                    if name == "auto":
                        continue
                    before = disk.speed(0.2)
                    told = one.run(max(1, FORWARDS // batch))
                    told["disk"] = [before, disk.speed(0.2)]
                    turns[name].append(told)
            ready = field["auto"].said
            for one in field.values():
                one.close()
            found[f"{batch}/{share}"] = {
                "batch": batch,
                "share": share,
                "turns": turns,
                "auto": ready["mode"],
                "expected": ready["expected"],
            }
    return found


def memory(work: Path) -> dict[str, Any]:
    """The peak of all memory, page cache included, of groups without a limit."""
    found = {}
    for name, batch in (("cache", 1), ("ring", 64)):
        for share in SHARES:
            allowed = LAYERS * EXPERTS // share * SIZE
            one = Contestant(name, work, allowed, batch, unlimited=True)
            one.ready()
            told = one.run(40 if batch == 1 else 4)
            one.close()
            found[f"{name}/{share}"] = {"memory": allowed, "peak": told["peak"]}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("part", choices=["prepare", "decode", "ring", "memory", "tables"])
    parser.add_argument("--shares", type=int, nargs="+", default=list(SHARES))
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, default=RESULTS / "beyond.json")
    options = parser.parse_args()
    if options.part == "prepare":
        prepare(options.work)
        return 0
    result: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.part == "decode":
        result.setdefault("decode", {}).update(decode(options.work, options.shares, options.rounds))
    elif options.part == "ring":
        result.setdefault("ring", {}).update(
            ring(options.work, options.shares, options.batches, options.rounds)
        )
    elif options.part == "memory":
        result["memory"] = memory(options.work)
    else:
        print(tables(result))
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
    write(options.json, json.dumps(result) + "\n")
    print(tables(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
