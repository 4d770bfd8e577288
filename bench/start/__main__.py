"""How soon a job trains: seconds from its command to the end of the first step, and memory.

    python -m bench.start                     # 5 rounds of all
    python -m bench.start --jobs flights --rounds 1 --no-write
    python -m bench.start --beside OTHER/bin/heterps   # another installation in the same rounds

In turns, for each job: `heterps submit` to a cluster that `heterps up` has started and that nobody
has used yet (`first`), once more (`standing`), and `heterps train`, which starts its own cluster
(`embedded`), all with a profile that is kept; then `heterps train` without one (`unprofiled`). The
time begins with the command's process and ends when a callback of the job is told of its first
step. Beside that: the proportional set size of each process once it trains, where the time goes,
and what the machine did otherwise. Results go to bench/results/start.json.
"""

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.pages import RESULTS, ROOT, machine, named, versions, write
from bench.start.job import JOBS, Job
from bench.start.memory import Used
from bench.start.modes import Started, Tool

TARGETS = {"first": 2.0, "standing": 2.0, "embedded": 6.0, "unprofiled": 12.0}  # seconds
_WORKER_BYTES = 400e6
_BESIDE = ", beside"


def main() -> int:
    """Run the rounds, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", nargs="+", choices=sorted(JOBS), default=sorted(JOBS))
    parser.add_argument("--modes", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--heterps", type=Path, default=Path(sys.executable).parent / "heterps")
    parser.add_argument("--beside", type=Path, help="of another installation, measured in turns")
    parser.add_argument("--out", type=Path, default=RESULTS / "start.json")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--timeline", action="store_true", help="print one of every round")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="heterps-start-") as folder:
        jobs = [Job.make(Path(folder, "jobs"), name, ROOT / "data") for name in options.jobs]
        tools = {"": Tool(options.heterps, Path(folder, "here"))}
        if options.beside is not None:
            tools[_BESIDE] = Tool(options.beside, Path(folder, "beside"))
        for tool in tools.values():
            for job in jobs:
                tool.learn(job)  # and the disk's cache is warm
        for number in range(options.rounds):
            for job in jobs:
                for name, tool in tools.items():
                    for started in tool.round(job, options.modes):
                        runs.append(_told(number, job, started, name))
                        _print(runs[-1])
                        if options.timeline or number == options.rounds - 1:
                            print(started.timeline, flush=True)
    summary = _summary(runs)
    _print_summary(summary)
    result = {
        "taken": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions("torch", "pyarrow", "numpy", "grpcio", "protobuf"),
        "targets_s": TARGETS,
        "worker_bytes_target": _WORKER_BYTES,
        "summary": summary,
        "runs": runs,
    }
    if not options.no_write:
        path = write(options.out, json.dumps(result, indent=1) + "\n")
        print(f"written to {path}; {named(result['versions'])}")
    return 0


def _told(number: int, job: Job, started: Started, installation: str) -> dict[str, Any]:
    return {
        "round": number,
        "job": job.name,
        "mode": started.mode + installation,
        "first_step_s": round(started.first_step_s, 3),
        "profile_kept": started.kept,
        "states_s": {name: round(at, 3) for name, at in started.states.items()},
        "load": round(os.getloadavg()[0], 2),
        "model_bytes": started.model_bytes,
        "data_bytes": started.data_bytes,
        "processes": [used.record() for used in started.used],
    }


def _print(run: dict[str, Any]) -> None:
    states = ", ".join(f"{name} {at:.2f}" for name, at in run["states_s"].items())
    said = f"{run['job']} {run['mode']}: first step after {run['first_step_s']:.2f} s"
    print(f"{said} ({states}; load {run['load']:.1f})", flush=True)
    for one in run["processes"]:
        print(f"    {Used(**one)}")
    sys.stdout.flush()


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and ranges by job and mode; of workers, bytes beyond model and data.

    Of the modes with a known profile those runs count that had one.
    """
    found: dict[str, Any] = {}
    for run in runs:
        known = not run["mode"].startswith("unprofiled")
        if known and not run["profile_kept"]:  # the machine was another than when it was measured
            continue
        found.setdefault(run["job"], {}).setdefault(run["mode"], []).append(run)
    return {job: {mode: _of(some) for mode, some in modes.items()} for job, modes in found.items()}


def _of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [run["first_step_s"] for run in runs]
    beyond = [
        one["pss"] - run["model_bytes"] - run["data_bytes"]
        for run in runs
        for one in run["processes"]
        if one["what"].startswith("workers.stage")
    ]
    rest = [
        sum(one["pss"] for one in run["processes"] if not one["what"].startswith("workers.stage"))
        for run in runs
    ]
    return {
        "rounds": len(runs),
        "median_s": round(statistics.median(seconds), 3),
        "least_s": min(seconds),
        "most_s": max(seconds),
        "worker_bytes_beyond": round(statistics.median(beyond)) if beyond else None,
        "other_processes_bytes": round(statistics.median(rest)),
    }


def _print_summary(summary: dict[str, Any]) -> None:
    for job, modes in summary.items():
        for mode, one in modes.items():
            worker, wanted = one["worker_bytes_beyond"] or 0, TARGETS[mode.removesuffix(_BESIDE)]
            print(
                f"{job:8} {mode:19} {one['median_s']:6.2f} s ({one['least_s']:.2f} to "
                f"{one['most_s']:.2f}; wanted {wanted:g}), worker beyond model and data "
                f"{worker / 1e6:.0f} MB (wanted {_WORKER_BYTES / 1e6:.0f}), "
                f"other processes {one['other_processes_bytes'] / 1e6:.0f} MB"
            )


if __name__ == "__main__":
    sys.exit(main())
