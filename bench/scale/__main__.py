"""What more workers bring: measured here with few of them, predicted for many by simulation.

    python -m bench.scale measure --seconds 280     # may be repeated: the least measured jobs first
    python -m bench.scale                           # fit, predict, draw the curves, write the page

`measure` runs jobs of 1 to 8 workers whose layers sleep, alone, in two stages, or with rows from
two servers, and notes what steps took and whose processor they took. All processes share the cores
of this machine, so that nothing else should run on it. The rest is arithmetic: constants are fitted
to the jobs of 1 to 3 workers alone, those of 4 to 8 are predicted with them, and what a simulation
says of a thousand workers is drawn. Results go to bench/results/scale.json, the page to
docs/scale.md, its pictures to docs/img.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.pages import RESULTS, machine, versions, write
from bench.scale.curves import curves
from bench.scale.fit import FITTED, Seen, fitted, predicted, seen
from bench.scale.job import Case
from bench.scale.measured import cluster, measure
from bench.scale.messages import message_costs, tell_s
from bench.scale.page import write_page
from heterps import Client
from scheduler.simulation.training import Costs

_RESULTS = RESULTS / "scale.json"
_BOUND = 0.1  # of a prediction's error
_LONGEST_S = 20.0  # a job, with all that starts it
_STAGES = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 4))


def cases() -> list[Case]:
    """All jobs, few workers first."""
    found = []
    for staleness in (0, 1):
        for k in range(1, 9):
            found.append(Case("bare", k, staleness=staleness))
            found.append(Case("rows", k, staleness=staleness, keys=26, shards=2))
        for front, back in _STAGES:
            found.append(Case("stages", front, back, staleness=staleness, rounds=2))
    return sorted(found, key=lambda case: case.workers)


def main() -> int:
    arguments = _parse()
    if arguments.what == "measure":
        return _measure(arguments.results, arguments.seconds, arguments.steady)
    results = json.loads(arguments.results.read_text())
    costs = _predict(results)
    results["curves"] = curves(_with_messages(costs, results["messages"]))
    write(arguments.results, json.dumps(results, indent=1) + "\n")
    if arguments.results == _RESULTS:
        write_page(results)
    return 0 if results["holds"] else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="?", choices=("measure", "page"), default="page")
    parser.add_argument("--results", type=Path, default=_RESULTS)
    parser.add_argument("--seconds", type=float, default=280.0, help="to begin jobs in")
    parser.add_argument("--steady", type=float, default=6.0, help="seconds of a job to measure")
    return parser.parse_args()


def _measure(results: Path, seconds: float, steady: float) -> int:
    """Measure what has been least often, until the time is over; every job is kept at once."""
    began = time.monotonic()
    kept = json.loads(results.read_text()) if results.is_file() else {"jobs": []}
    if "messages" not in kept:
        kept["messages"] = {**message_costs(), "tell_s": tell_s()}
        print(kept["messages"], flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="heterps-scale-") as folder,
        cluster(Path(folder, "cluster")) as made,
    ):
        client = Client(made.address)
        number = 0
        while time.monotonic() - began < seconds - _LONGEST_S:
            done = Counter(
                (job["kind"], job["front"], job["back"], job["staleness"]) for job in kept["jobs"]
            )
            case = min(cases(), key=lambda c: done[c.kind, c.front, c.back, c.staleness])
            found = measure(client, Path(folder, str(number)), case, steady)
            number += 1
            print(f"{case.name}: {found.step_s * 1e3:.1f} ms a step, {found}", flush=True)
            kept |= {
                "benchmark": "scale",
                "date": datetime.date.today().isoformat(),
                "machine": machine(),
                "versions": versions("torch"),
            }
            kept["jobs"].append(asdict(found))
            write(results, json.dumps(kept, indent=1) + "\n")
    return 0


def _predict(results: dict[str, Any]) -> Costs:
    """Fit to the smallest jobs and simulate all; notes both in the results."""
    cores = results["machine"]["cores"]
    all_seen = seen(cases(), results["jobs"])
    costs = fitted(all_seen, cores)
    results["costs"] = asdict(costs)
    results["predictions"] = [
        {
            "name": one.case.name,
            "workers": one.case.workers,
            "runs": one.runs,
            "measured_s": one.step_s,
            "simulated_s": (found := predicted(one, costs, cores)).simulated_s,
            "error": found.error,
            "naive_error": _naive(one, all_seen) / one.step_s - 1,
        }
        for one in all_seen
    ]
    told = [p for p in results["predictions"] if p["workers"] > FITTED]
    results["holds"] = bool(told) and all(abs(p["error"]) <= _BOUND for p in told)
    for p in results["predictions"]:
        print(
            f"{p['name']:14} measured {p['measured_s'] * 1e3:6.1f} ms, simulated "
            f"{p['simulated_s'] * 1e3:6.1f}: {p['error']:+.1%} (naive {p['naive_error']:+.1%})"
        )
    return costs


def _naive(one: Seen, all_seen: list[Seen]) -> float:
    """Seconds a step if more workers cost nothing: by the layers alone, as in the smallest job."""
    alike = (one.case.kind, one.case.staleness)
    least = min(
        (other for other in all_seen if (other.case.kind, other.case.staleness) == alike),
        key=lambda other: other.case.workers,
    )
    free = Costs()
    layers = predicted(one, free, 0).simulated_s / predicted(least, free, 0).simulated_s
    return least.step_s * layers


def _with_messages(costs: Costs, messages: dict[str, float]) -> Costs:
    """The fitted costs of the executor, with those of messages as measured by themselves."""
    three = ("pull", "push", "commit")
    return replace(
        costs,
        tell_s=messages["tell_s"],
        client_message_s=sum(messages[f"client_{what}_message_s"] for what in three) / 3,
        client_pull_s=messages["client_pull_s"],
        client_push_s=messages["client_push_s"],
        message_s=sum(messages[f"{what}_message_s"] for what in three) / 3,
        pull_s=messages["pull_s"],
        push_s=messages["push_s"],
        commit_s=messages["commit_s"],
    )


if __name__ == "__main__":
    sys.exit(main())
