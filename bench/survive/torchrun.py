"""torchrun with torch.distributed.checkpoint: what kills of its workers cost it."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.survive.figures import longest_gap
from bench.survive.job import Shape, steps_begun, trained_last
from bench.survive.kills import SETTLED_S, drawn, pause
from bench.survive.plain import Settings
from tests.pids import alive

_LOOK_S = 0.05
_LIMIT_S = 900.0


def run_torchrun(folder: Path, shape: Shape, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run without and one with kills, at the instants of the first job that has kills."""
    every = int(arguments.checkpoint.removesuffix(" steps"))
    unfailed = _run(folder / "unfailed", shape, every, arguments, 0)
    print(f"torchrun, unfailed: {unfailed['seconds']:.1f} s", flush=True)
    killed = _run(folder / "killed", shape, every, arguments, arguments.kills)
    print(f"torchrun: {killed['seconds']:.1f} s, {killed['lost_steps']:.1f} lost steps", flush=True)
    ratio = unfailed["seconds"] / killed["seconds"] if killed["seconds"] else 0.0
    return {"goodput": ratio, "unfailed": unfailed, "killed": killed}


def _run(
    folder: Path,
    shape: Shape,
    every: int,
    arguments: argparse.Namespace,
    most: int,
) -> dict[str, Any]:
    (folder / "trace").mkdir(parents=True)
    settings = Settings(
        *(str(folder), str(folder / "trace"), shape.front + shape.back),
        *(shape.seconds * shape.front, shape.seconds * shape.back),
        *(shape.width, shape.samples, shape.batch, shape.steps, every),
    )
    told = folder / "settings.json"
    told.write_text(json.dumps(asdict(settings)))
    run = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000"]
    run += ["--nproc-per-node", str(settings.workers), "-m", "bench.survive.plain"]
    argv = [sys.executable, *run, str(told)]
    chance = random.Random(f"{arguments.seed} 1")
    kills: list[float] = []
    until = time.monotonic() + _LIMIT_S
    due: float | None = None
    after = 0.0  # Unix time
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
        while (code := process.poll()) is None and time.monotonic() < until:
            if due is None and trained_last(folder) > after:
                due = time.monotonic() + pause(chance, arguments.every)
            elif due is not None and time.monotonic() > due and len(kills) < most:
                drawn(chance, arguments.kinds)
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(_training(folder / "trace")), signal.SIGKILL)
                    kills.append(time.time())
                due, after = None, time.time() + SETTLED_S
            time.sleep(_LOOK_S)
        if code is None:
            process.terminate()  # with its workers
            process.wait()
    begun = steps_begun(folder)
    if code != 0:
        raise RuntimeError(f"torchrun ended with {code}: {(folder / 'log').read_text()[-2000:]}")
    return {
        "seconds": begun[-1] - begun[0],
        "kills": len(kills),
        "lost_steps": (len(begun) - shape.steps * settings.workers) / settings.workers,
        "stood_still_s": [longest_gap(begun, at, 120.0) for at in kills],
    }


def _training(trace: Path) -> list[int]:
    """The processes that live and have trained."""
    return sorted(pid for pid in (int(path.name) for path in trace.iterdir()) if alive(pid))
