"""Clients of the soak, each a process: they push, make steps or save until they are told to end.

python -m tests.soak.clients push|steps|save --seed N --ledger FILE --addresses A,B [--place DIR]
"""

import argparse
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from chassis.process import announce, install_signals
from ps import CheckpointError, ParameterClient, ShardError
from tests.soak.ledger import PUSHED, Ledger, keys_of

DIM = 2
STAMPED = np.arange(300)  # keys of the tables whose rows tell which save they are of
_PATIENCE_S = 60.0


def stamp_of(seed: int) -> str:
    """The table that the saver of this seed writes the number of its save to."""
    return f"stamp{seed}"


def _push(client: ParameterClient, seed: int, number: int) -> None:
    keys = keys_of(seed, number)
    client.push("pushed", keys, np.full((PUSHED, DIM), -1, np.float32))


def _step(client: ParameterClient, seed: int, number: int) -> None:
    """Two parts of half each."""
    keys = keys_of(seed, number)
    series = f"stepped.{seed}"
    for slot in range(2):
        part = {"stepped": (keys, np.full((PUSHED, DIM), -0.5, np.float32))}
        client.stage_async(series, number, slot, part).result(_PATIENCE_S)
    client.commit_async(series, number, 2).result(_PATIENCE_S)


def _saves(place: Path) -> Callable[[ParameterClient, int, int], None]:
    def save(client: ParameterClient, seed: int, number: int) -> None:
        stamps = np.full((len(STAMPED), DIM), number, np.float32)
        client.assign(stamp_of(seed), STAMPED, stamps)
        client.save(place, timeout_s=_PATIENCE_S)

    return save


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("push", "steps", "save"))
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--addresses", required=True)
    parser.add_argument("--place", type=Path)
    parser.add_argument("--ready-file", type=Path)
    options = parser.parse_args()
    ended = threading.Event()
    install_signals(ended)
    announce(options.ready_file)
    work = {"push": _push, "steps": _step, "save": _saves(options.place)}[options.what]
    ledger = Ledger(options.ledger)
    number = options.first
    with ParameterClient(
        options.addresses.split(","), timeout_s=_PATIENCE_S, shared_memory=options.seed % 2 == 0
    ) as client:
        while not ended.is_set():
            ledger.begin(number)
            try:
                work(client, options.seed, number)
            except (ShardError, CheckpointError) as error:
                print(f"{options.what} {number}: {error}", flush=True)  # its outcome is open
                if options.what == "steps":
                    client.discard_async(f"stepped.{options.seed}", number)
            else:
                ledger.acknowledge(number)
            number += 1
            ended.wait(0.5 if options.what == "save" else 0.02)
    return 0


if __name__ == "__main__":
    sys.exit(main())
