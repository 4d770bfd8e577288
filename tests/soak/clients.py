"""Clients of the soak, each a process: they push, make steps, save or publish until told to end.

python -m tests.soak.clients push|steps|save|deltas|publish --seed N --ledger FILE
    --addresses A,B [--place DIR]
"""

import argparse
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from chassis.process import announce, install_signals
from ps import CheckpointError, ParameterClient, Publisher, ShardError
from tests.soak.ledger import PUSHED, Ledger, keys_of

SAVING = ("save", "deltas", "publish")
DIM = 2
STAMPED = np.arange(300)  # keys of the tables whose rows tell which save they are of
_PATIENCE_S = 60.0
_CHAIN = 4  # saves that build on each other
Work = Callable[[ParameterClient, int, int], None]


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


def _stamp(client: ParameterClient, seed: int, number: int) -> None:
    client.assign(stamp_of(seed), STAMPED, np.full((len(STAMPED), DIM), number, np.float32))


def _saves(place: Path) -> Work:
    def save(client: ParameterClient, seed: int, number: int) -> None:
        _stamp(client, seed, number)
        client.save(place, timeout_s=_PATIENCE_S)

    return save


def _deltas(place: Path) -> Work:
    """Save after save at places of their own, most of them deltas; what none builds on goes."""
    chain: list[Path] = []

    def save(client: ParameterClient, seed: int, number: int) -> None:
        if len(chain) == 1:  # it was acknowledged
            for other in place.glob("*"):
                if other != chain[0]:
                    shutil.rmtree(other)
        _stamp(client, seed, number)
        to = place / str(number)
        since = chain[-1] if 0 < len(chain) < _CHAIN else None
        mode = "checkpoint" if since is None else "delta"
        before = [] if since is None else [*chain]
        chain.clear()
        client.save(to, timeout_s=_PATIENCE_S, mode=mode, since=since)
        chain.extend([*before, to])

    return save


def _publishes(place: Path) -> Work:
    def publish(client: ParameterClient, seed: int, number: int) -> None:
        _stamp(client, seed, number)
        Publisher(client, place, full_every=3, keep=1, prefix=stamp_of(seed)).publish()

    return publish


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("push", "steps", *SAVING))
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
    work = {
        "push": _push,
        "steps": _step,
        "save": _saves(options.place / "one"),
        "deltas": _deltas(options.place / "deltas"),
        "publish": _publishes(options.place / "feed"),
    }[options.what]
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
            ended.wait(0.5 if options.what in SAVING else 0.02)
    return 0


if __name__ == "__main__":
    sys.exit(main())
