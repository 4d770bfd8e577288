"""A CTR network trained by HeterPS and by others, in turns.

26 slots over 10 million keys, rows of 16, dense layers 429-400-400-1, batches of 4,096; exact
Adagrad for rows, Adam for the rest. All have two cores; each takes its turn in every round, another
one first each time. The figure to read is the median of the rounds' ratios.

    python -m bench.ctr [--rounds 5] [--peers plain,fbgemm] [--json FILE]

A run that was ended goes on from its file with `--resume`. A peer that is not installed, fails or
trains something else than a reference in NumPy is told as not run. FBGEMM, TorchRec, TensorFlow and
TFRA are those of `python -m bench.ps --install-peers`. All at once take about 13 GB of memory.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.answering import PeerError
from bench.ctr.check import LOSS_TOLERANCE, ROWS_TOLERANCE, SLOT_TOLERANCE, Expected, expected
from bench.ctr.ours import train, write_job
from bench.ctr.processes import Peer
from bench.ctr.report import page
from bench.ctr.roster import ENTRIES, OURS, unit
from bench.ctr.shape import BATCH, CHECKED, CHECKED_SAMPLES, Data
from bench.pages import DOCS, RESULTS, machine, versions, write
from bench.ps.roster import DEFAULT_DIR, installed
from heterps import Client, Cluster

Found = dict[str, Any]
_SINGLE = 4  # units of one core that the embedded cluster offers


def main() -> int:
    options = _parse()
    began = time.monotonic()
    found: Found = {"rounds": [], "checks": {}, "failed": {}}
    if options.resume and options.json.exists():
        kept = json.loads(options.json.read_text())
        if kept["settings"] != _settings(options):
            sys.exit(
                f"{options.json}: it has other settings: {kept['settings']}; leave --resume out"
            )
        found = {key: kept[key] for key in found} | {"failed": {}}
    with tempfile.TemporaryDirectory(prefix="heterps-bench-") as made:
        folder = Path(made)
        data = Data.drawn(options.batches)
        data.save(folder / "data.npz")
        ours = [name for name in options.ours.split(",") if name]
        threads = {1, *(OURS[name].threads for name in ours)}
        units = {unit(number): _units(number) for number in threads}
        jobs = {name: write_job(folder / "job", data, OURS[name]) for name in ours}
        with (
            _peers(options, folder, expected(data), found) as peers,
            Cluster(folder / "cluster", units) as cluster,
        ):
            client = Client(cluster.address)
            while len(found["rounds"]) < options.rounds:
                names = [name for name in (*jobs, *peers) if name not in found["failed"]]
                turns: dict[str, dict[str, Any]] = {}
                for name in _rotated(names, len(found["rounds"])):
                    if name in jobs:
                        turns[name] = train(client, jobs[name], folder / "job", options.steps)
                        continue
                    try:
                        turns[name] = peers[name].turn(options.seconds, ENTRIES[name].threads)
                    except PeerError as error:
                        found["failed"][name] = str(error)
                        print(f"{name}: {error}", flush=True)
                found["rounds"].append(turns)
                rates = {name: round(turn["samples_per_s"]) for name, turn in turns.items()}
                print(f"round {len(found['rounds'])}: {rates}", flush=True)
                _keep(found, options)
                if options.minutes and time.monotonic() - began > 60 * options.minutes:
                    break
    return 0


def _units(threads: int) -> int:
    """How many units of so many cores the embedded cluster offers."""
    return _SINGLE if threads == 1 else (os.cpu_count() or 1) // threads


@contextmanager
def _peers(
    options: argparse.Namespace, folder: Path, wanted: Expected, found: Found
) -> Iterator[Mapping[str, Peer]]:
    """Processes of peers by names, those that train what is wanted; one may have several names."""
    peers: dict[str, Peer] = {}
    try:
        for name in [name for name in options.peers.split(",") if name]:
            entry = ENTRIES[name]
            if entry.same_process_as:
                if entry.same_process_as in peers:
                    peers[name] = peers[entry.same_process_as]
                continue
            try:
                peers[name] = Peer(entry, folder / "data.npz", options.peers_dir, folder)
                if entry.checked:
                    verdict = wanted.held(peers[name].losses, peers[name].rows())
                    found["checks"][name] = asdict(verdict)
                    print(f"{name}: {verdict}", flush=True)
                    if not verdict.right:
                        peers.pop(name).close()
                        raise PeerError(f"it trains something else: {verdict}")
            except PeerError as error:
                found["failed"][name] = str(error)
                print(f"{name}: {error}", flush=True)
        yield peers
    finally:
        for peer in peers.values():
            peer.close()


def _rotated(names: list[str], number: int) -> list[str]:
    """Another one first in every round."""
    first = number % len(names)
    return names[first:] + names[:first]


def _keep(found: Found, options: argparse.Namespace) -> None:
    whole = {
        "benchmark": "ctr",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch", "numpy") | installed(options.peers_dir),
        "settings": _settings(options),
        **found,
    }
    write(options.json, json.dumps(whole, indent=1) + "\n")
    page(whole, options.docs)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    checked = {
        "steps": CHECKED,
        "samples": CHECKED_SAMPLES,
        "loss": LOSS_TOLERANCE,
        "rows": ROWS_TOLERANCE,
        "slot": SLOT_TOLERANCE,
    }
    return {
        "batch": BATCH,
        "batches": options.batches,
        "steps": options.steps,
        "seconds": options.seconds,
        "checked": checked,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a peer's turn")
    parser.add_argument("--steps", type=int, default=60, help="of a job's turn")
    parser.add_argument("--batches", type=int, default=32, help="of the data")
    parser.add_argument("--ours", default=",".join(OURS), help="comma-separated")
    parser.add_argument("--peers", default=",".join(ENTRIES), help="comma-separated")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--minutes", type=float, default=0.0, help="end after the round then")
    parser.add_argument("--resume", action="store_true", help="go on from the file")
    parser.add_argument("--json", type=Path, default=RESULTS / "ctr.json")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the page goes")
    options = parser.parse_args()
    for given, known in ((options.ours, OURS), (options.peers, ENTRIES)):
        for name in filter(None, given.split(",")):
            if name not in known:
                parser.error(f"unknown contestant {name!r}; expected {', '.join(known)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
