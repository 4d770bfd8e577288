"""Starting a job in each of the ways, and what came of it."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.start.job import Job
from bench.start.memory import Used, used_by
from bench.start.timeline import timeline
from heterps import Client

_MOST_S = 180.0  # for a first step
_TRAINS_S = 2.0  # until memory is looked at
_IDLE_S = 8.0  # that a cluster has stood before its first job


@dataclass(slots=True)
class Started:
    """A job that was started.

    Attributes:
        mode: how.
        first_step_s: from its command to the end of its first step.
        kept: whether it was planned by a profile that was kept.
        states: seconds from the command to each of the job's states.
        used: memory of all processes, once it trains.
        model_bytes: of a worker's dense weights, gradients and optimizer.
        data_bytes: of the samples that a worker's host keeps.
        timeline: for people.
    """

    mode: str
    first_step_s: float
    kept: bool
    states: dict[str, float]
    used: list[Used]
    model_bytes: int
    data_bytes: int
    timeline: str = field(repr=False)


class Tool:
    """Runs `heterps` with a home, temporary files and profiles of its own.

    Args:
        program: the command.
        folder: where all that lies.
    """

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._temporary = folder / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("HETERPS_")},
            "HETERPS_HOME": str(folder / "home"),
            "HETERPS_LOG_FORMAT": "json",
            "TMPDIR": str(self._temporary),
            "PYTHONUNBUFFERED": "1",
        }

    def learn(self, job: Job) -> None:
        """Have a profile of a job, which both kinds of cluster take."""
        for mode in ("embedded", "standing"):
            list(self.round(job, [mode]))

    def round(self, job: Job, modes: Sequence[str]) -> Iterator[Started]:
        """Start a job in these ways, one after the other."""
        standing = [mode for mode in ("first", "standing") if mode in modes]
        if standing:
            self._empty()
            self._run("up", "--units", "2")
            try:
                time.sleep(_IDLE_S)
                for mode in ("first", "standing"):
                    started = self._submitted(job, mode)
                    if mode in standing:
                        yield started
            finally:
                self._run("down")
        for mode in ("embedded", "unprofiled"):
            if mode in modes:
                self._empty()
                yield self._trained(job, mode)

    def _profiles(self, mode: str) -> Path:
        return self._folder / "profiles" / ("none" if mode == "unprofiled" else "kept")

    def _empty(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        shutil.rmtree(self._profiles("unprofiled"), ignore_errors=True)

    def _submitted(self, job: Job, mode: str) -> Started:
        job.stepped.unlink(missing_ok=True)
        began = time.time()
        job_id = json.loads(self._run("submit", *job.options, "--json"))["job_id"]
        at = _stepped(job)
        time.sleep(_TRAINS_S)
        cluster = self._folder / "home" / "cluster"
        running = json.loads((self._folder / "home" / "cluster.json").read_text())
        used = used_by(running["pid"])
        address = running["address"]
        started = self._found(mode, job_id, began, at, used, cluster / "logs", address)
        self._run("cancel", job_id)
        return started

    def _trained(self, job: Job, mode: str) -> Started:
        job.stepped.unlink(missing_ok=True)
        began = time.time()
        process = subprocess.Popen(
            [str(self._program), "train", *job.options, "--units", "2"],
            env=self._environment | {"HETERPS_PROFILES": str(self._profiles(mode))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            at = _stepped(job, process)
            time.sleep(_TRAINS_S)
            used = used_by(process.pid)
            logs = next(self._temporary.rglob("scheduler.ready.json")).parent
            address = json.loads((logs / "scheduler.ready.json").read_text())["address"]
            to = ("--scheduler", address)
            jobs = json.loads(self._run("jobs", "--json", *to))  # ended ones of before, too
            job_id = next(one["job_id"] for one in jobs if one["state"] == "running")
            return self._found(mode, job_id, began, at, used, logs, address)
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=60)
            process.kill()

    def _found(
        self,
        mode: str,
        job_id: str,
        began: float,
        at: float,
        used: list[Used],
        logs: Path,
        address: str,
    ) -> Started:
        """What is known of a job while it runs."""
        with Client(address) as client:
            decision = client.decision(job_id)
        said = self._run("logs", job_id, "--scheduler", address)
        events = timeline(began, at, [*logs.parent.rglob("*.log")], said, job_id)
        states = {
            words[0].lower(): event.at
            for event in events
            if event.who == "scheduler" and len(words := event.what.split(": ")[-1].split()) == 1
        }
        model, data = 0.0, 0.0
        if (workload := decision.workload) is not None:
            model = sum(2 * one.weight_bytes + one.optimizer_bytes for one in workload.layers)
            data = workload.data_bytes
        kept = any(text.startswith("Costs are those of a profile") for text in decision.reasons)
        shown = "\n".join(f"    {event}" for event in events)
        return Started(mode, at - began, kept, states, used, int(model), int(data), shown)

    def _run(self, *arguments: str) -> str:
        environment = self._environment | {"HETERPS_PROFILES": str(self._profiles(""))}
        done = subprocess.run(
            [str(self._program), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"heterps {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout


def _stepped(job: Job, process: "subprocess.Popen[bytes] | None" = None) -> float:
    """When the first step was over."""
    until = time.monotonic() + _MOST_S
    while time.monotonic() < until:
        with suppress(OSError, ValueError):
            return float(job.stepped.read_text())
        if process is not None and process.poll() is not None:
            said = process.stdout.read().decode() if process.stdout else ""
            raise RuntimeError(f"heterps train ended {process.returncode}: {said}")
        time.sleep(0.05)
    raise RuntimeError(f"{job.name}: no step within {_MOST_S:.0f} s")
