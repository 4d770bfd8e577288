"""A CTR network trained by HeterPS and by others, in turns.

26 slots over 10 million keys, rows of 16, dense layers 429-400-400-1, batches of 4,096; exact
Adagrad for rows, Adam for the rest. All have two cores; each takes its turn in every round, another
one first each time. The figure to read is the median of the rounds' ratios.

    python -m bench.ctr [--rounds 5] [--peers plain,fbgemm] [--json FILE]

A run that was ended goes on from its file with `--resume`. A peer that is not installed or fails is
told as not run. FBGEMM is that of `python -m bench.ps --install-peers`.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.ctr.ours import train, write_job
from bench.ctr.shape import BATCH, Data
from bench.pages import DOCS, RESULTS, ROOT, machine, measured_on, table, versions, write
from bench.ps.roster import DEFAULT_DIR
from heterps import Client, Cluster

_PEERS = {
    "plain": "PyTorch, one process, two threads",
    "fbgemm": "FBGEMM TBE, one process, two threads",
    "torch_rpc": "PyTorch RPC, worker + server",
}
_OURS = {"1+1": (1, 1), "2+2": (2, 2)}


class Peer:
    """A peer's process, idle until its turn."""

    def __init__(self, name: str, data: Path, home: Path) -> None:
        environment = dict(os.environ)
        if name == "fbgemm":
            path = os.pathsep.join([str(home / "fbgemm"), environment.get("PYTHONPATH", "")])
            environment["PYTHONPATH"] = path
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"bench.ctr.peers.{name}", str(data), str(os.cpu_count() or 1)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def turn(self, seconds: float) -> dict[str, float]:
        """Train for so long."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"seconds": seconds}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"ended with exit code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer


def main() -> int:
    options = _parse()
    began = time.monotonic()
    found: dict[str, Any] = {"rounds": [], "failed": {}}
    if options.resume and options.json.exists():
        found = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory(prefix="heterps-bench-") as made:
        folder = Path(made)
        data = Data.drawn(options.batches)
        data.save(folder / "data.npz")
        jobs = {
            name: write_job(folder / "job", data, *of, options.staleness)
            for name, of in _OURS.items()
        }
        peers: dict[str, Peer] = {}
        names = [name for name in options.peers.split(",") if name]
        try:
            for name in names:
                try:
                    peers[name] = Peer(name, folder / "data.npz", options.peers_dir)
                except (RuntimeError, OSError) as error:
                    found["failed"][name] = str(error)
            with Cluster(folder / "cluster", {"cpu": 4}) as cluster:
                client = Client(cluster.address)
                everybody = [*jobs, *peers]
                while len(found["rounds"]) < options.rounds:
                    number = len(found["rounds"])
                    turns: dict[str, dict[str, float]] = {}
                    for name in (
                        everybody[number % len(everybody) :] + everybody[: number % len(everybody)]
                    ):
                        if name in peers:
                            turns[name] = peers[name].turn(options.seconds)
                        else:
                            turns[name] = train(client, jobs[name], options.steps)
                    found["rounds"].append(turns)
                    rates = {name: round(turn["samples_per_s"]) for name, turn in turns.items()}
                    print(f"round {number + 1}: {rates}", flush=True)
                    _keep(found, options)
                    if options.minutes and time.monotonic() - began > 60 * options.minutes:
                        break
        finally:
            for peer in peers.values():
                peer.close()
    return 0


def _keep(found: dict[str, Any], options: argparse.Namespace) -> None:
    whole = {
        "benchmark": "ctr",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("torch", "numpy", "fbgemm-gpu-cpu"),
        "settings": {"batch": BATCH, "steps": options.steps, "staleness": options.staleness},
        **found,
    }
    write(options.json, json.dumps(whole, indent=1) + "\n")
    page(whole, options.docs)


def page(found: dict[str, Any], docs: Path) -> Path:
    """Write `train_benchmark.md` from results."""
    rounds = found["rounds"]
    lines = []
    for name in rounds[0]:
        title = _PEERS.get(name) or f"HeterPS, {_counted(name)}"
        rates = [one[name]["samples_per_s"] for one in rounds]
        ratios = [
            statistics.median(
                one[ours]["samples_per_s"] / one[name]["samples_per_s"] for one in rounds
            )
            for ours in _OURS
        ]
        cpu = [one[name]["cpu_s"] for one in rounds if "cpu_s" in one[name]]
        lines.append(
            (
                title,
                f"{statistics.median(rates) / 1e3:.1f}",
                *(f"{ratio:.2f}" for ratio in ratios),
                f"{1e3 * statistics.median(cpu):.0f}" if cpu else "–",
            )
        )
    lines += [(_PEERS[name], "not run", *("" for _ in _OURS), "") for name in found["failed"]]
    over = [f"HeterPS {ours.replace('+', ' + ')} over it" for ours in _OURS]
    head = ("", "1,000 samples/s", *over, "CPU ms a step")
    used = measured_on(found["machine"], found["versions"])
    text = (
        "# How fast a CTR network trains\n\n"
        f"Made by `python -m bench.ctr` from `bench/results/ctr.json`; do not edit. "
        f"{found['date']}; {used}.\n\n"
        "26 slots over 10 million keys by Zipf's law, rows of 16 with exact Adagrad, dense layers "
        f"429-400-400-1 with Adam, batches of {found['settings']['batch']:,}, staleness "
        f"{found['settings']['staleness']}. All processes share this machine's cores. "
        f"{len(rounds)} rounds, in which all take turns; rates are medians of them, ratios the "
        "medians of the rounds' ratios. HeterPS reads its batches from a file, the others have "
        "them in memory.\n\n" + table(head, lines)
    )
    return write(docs / "train_benchmark.md", text)


def _counted(name: str) -> str:
    workers, _, shards = name.partition("+")
    counts = ((workers, "worker"), (shards, "shard"))
    return " + ".join(f"{n} {what}{'' if n == '1' else 's'}" for n, what in counts)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a peer's turn")
    parser.add_argument("--steps", type=int, default=60, help="of a job's turn")
    parser.add_argument("--batches", type=int, default=32, help="of the data")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--peers", default=",".join(_PEERS), help="comma-separated")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--minutes", type=float, default=0.0, help="end after the round then")
    parser.add_argument("--resume", action="store_true", help="go on from the file")
    parser.add_argument("--json", type=Path, default=RESULTS / "ctr.json")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the page goes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
