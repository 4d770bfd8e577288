"""The same layers under torchrun and Ray Train: what kills of their workers cost them."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.survive.figures import caught_up, longest_gap, spread
from bench.survive.job import Shape, firsts_begun, steps_begun, trained_last
from bench.survive.kills import SETTLED_S, drawn, pause
from bench.survive.plain import Settings
from tests.pids import alive

_LOOK_S = 0.05
_LIMIT_S, _LIMIT_A_KILL_S = 300.0, 120.0


def _torchrun(workers: int) -> list[str]:
    elastic = ["--standalone", "--max-restarts", "1000", "--monitor-interval", "0.1"]
    processes = ["--nproc-per-node", str(workers)]
    return ["-m", "torch.distributed.run", *elastic, *processes, "-m", "bench.survive.torchrun"]


# By name: the arguments of Python before the file of settings, what it must be able to import, and
# what installs that.
RIVALS: Final[dict[str, tuple[Callable[[int], list[str]], str, str]]] = {
    "torchrun": (_torchrun, "torch.distributed.run", "pip install torch"),
    "ray_train": (
        lambda workers: ["-m", "bench.survive.raytrain"],
        "ray.train.torch",
        "pip install 'ray[train]'",
    ),
}


def run_rivals(folder: Path, shape: Shape, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of each, one run without and one with kills, after the pauses of the first job with kills.

    Of one that is not installed, `not_run` says how to install it.
    """
    found: dict[str, Any] = {}
    for name, (argv, module, install) in RIVALS.items():
        tried = subprocess.run(
            [sys.executable, "-c", f"import {module}"], check=False, capture_output=True, text=True
        )
        if tried.returncode:
            why = (tried.stderr.strip().splitlines() or ["no reason was told"])[-1]
            found[name] = {"not_run": f"{why}; to have it: {install}"}
            print(f"{name} is not run: {found[name]['not_run']}", file=sys.stderr, flush=True)
            continue
        of = _Rival(name, argv(shape.front + shape.back), folder / name, shape, arguments)
        unfailed, killed = of.run(0), of.run(arguments.kills)
        ratio = unfailed["seconds"] / killed["seconds"] if killed["seconds"] else 0.0
        found[name] = {"goodput": ratio, "unfailed": unfailed, "killed": killed}
    return found


class _Rival:
    def __init__(
        self,
        name: str,
        argv: list[str],
        folder: Path,
        shape: Shape,
        arguments: argparse.Namespace,
    ) -> None:
        self._name, self._argv, self._folder = name, argv, folder
        self._shape, self._arguments = shape, arguments

    def run(self, most: int) -> dict[str, Any]:
        """One training, with at most so many kills."""
        folder = self._folder / ("killed" if most else "unfailed")
        (folder / "trace").mkdir(parents=True)
        settings = self._settings(folder)
        told = folder / "settings.json"
        told.write_text(json.dumps(asdict(settings)))
        kills: list[float] = []
        with (folder / "log").open("w") as log:
            argv = [sys.executable, *self._argv, str(told)]
            process = subprocess.Popen(argv, stdout=log, stderr=log)
            try:
                self._kill(process, folder, most, kills)
            finally:
                if process.poll() is None:
                    process.terminate()  # with its workers
                code = process.wait()
        if code != 0:
            last = (folder / "log").read_text()[-2000:]
            raise RuntimeError(f"{self._name} ended with {code}: {last}")
        begun, firsts = steps_begun(folder), firsts_begun(folder)
        steps = len(begun) / settings.workers  # each sleeps once a step
        if steps < settings.steps:
            raise RuntimeError(f"{self._name} trained {steps} of {settings.steps} steps")
        found = {
            "seconds": begun[-1] - begun[0],
            "kills": len(kills),
            "lost_steps": steps - settings.steps,
            "stood_still_s": spread([longest_gap(begun, at, 120.0) for at in kills]),
            "caught_up_s": spread([s for at in kills if (s := caught_up(firsts, at)) is not None]),
        }
        print(f"{self._name}: {json.dumps(found)}", flush=True)
        return found

    def _settings(self, folder: Path) -> Settings:
        shape = self._shape
        every = int(self._arguments.checkpoint.removesuffix(" steps"))
        return Settings(
            *(str(folder), str(folder / "trace"), shape.front + shape.back),
            *(shape.seconds * shape.front, shape.seconds * shape.back),
            *(shape.width, shape.samples, shape.batch, shape.steps, every),
        )

    def _kill(
        self, process: "subprocess.Popen[bytes]", folder: Path, most: int, kills: list[float]
    ) -> None:
        """Kill workers until it has ended, as often as is left of its time."""
        shape, arguments = self._shape, self._arguments
        layers_s = shape.steps * shape.batch * shape.seconds
        until = time.monotonic() + _LIMIT_S + _LIMIT_A_KILL_S * most + 10 * layers_s
        chance = random.Random(f"{arguments.seed} 1")
        due: float | None = None
        after = 0.0  # Unix time
        while process.poll() is None and time.monotonic() < until:
            if due is None and trained_last(folder) > after:
                due = time.monotonic() + pause(chance, arguments.every)
            elif due is not None and time.monotonic() > due and len(kills) < most:
                drawn(chance, arguments.kinds)
                if training := _training(folder / "trace"):
                    with suppress(ProcessLookupError):
                        os.kill(chance.choice(training), signal.SIGKILL)
                        kills.append(time.time())
                due, after = None, time.time() + SETTLED_S
            time.sleep(_LOOK_S)


def _training(trace: Path) -> list[int]:
    """The processes that live and have trained."""
    return sorted(pid for pid in (int(path.name) for path in trace.iterdir()) if alive(pid))
