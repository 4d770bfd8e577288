"""`make soak`: kills and pauses for an hour, while everything works and every account must hold.

python -m tests.soak.run --minutes 60 --seed 1 [--figures FILE] [--events FILE]

What happens follows from the seed, but for the instants at which it does. Each event leaves a line
in the events; a breach of what is promised ends the run, and says which were the last ones.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from chassis.closing import Closing
from tests.soak.jobs import Jobs
from tests.soak.tables import Breach, Tables

TAG = "HETERPS_SOAK_TAG"  # in the environment of all that a run starts
_SETTLE = 40  # events between two looks at accounts, clients at rest
_SHOWN = 12  # events, where something is wrong
_END_S = 20.0  # for what was started to be gone


@dataclass
class Act:
    """One who disturbs one part, on a thread of its own.

    Attributes:
        deeds: what it may do, each as likely as its weight says.
        settle: looks at the accounts.
    """

    name: str
    deeds: dict[str, tuple[int, Callable[[], None]]]
    settle: Callable[[], None]
    events: int = 0
    error: BaseException | None = None
    last: list[str] = field(default_factory=list)

    def run(self, ended: threading.Event, limit: int, chance: random.Random, log: "Log") -> None:
        """Until it is time, or `limit` events have been."""
        names = list(self.deeds)
        weights = [self.deeds[name][0] for name in names]
        try:
            while not ended.is_set() and self.events < limit:
                name = chance.choices(names, weights)[0]
                began = time.monotonic()
                self._note(log, name, 0.0)
                self.deeds[name][1]()
                self._note(log, f"{name} done", time.monotonic() - began)
                self.events += 1
                if self.events % _SETTLE == 0:
                    self.settle()
                    self._note(log, "settled", 0.0)
                ended.wait(chance.uniform(0, 0.5))
            self.settle()
        except BaseException as error:
            self.error = error
            ended.set()

    def _note(self, log: "Log", what: str, took_s: float) -> None:
        line = log.write(self.name, what, took_s)
        self.last = [*self.last[-_SHOWN:], line]


class Log:
    """The events, a line of JSON each."""

    def __init__(self, file: IO[str] | None) -> None:
        self._file, self._lock, self._began = file, threading.Lock(), time.monotonic()

    def write(self, act: str, what: str, took_s: float) -> str:
        """The line."""
        at = round(time.monotonic() - self._began, 2)
        line = json.dumps({"s": at, "act": act, "event": what, "took_s": round(took_s, 2)})
        if self._file is not None:
            with self._lock:
                print(line, file=self._file, flush=True)
        return line


class Soak(Closing):
    """All parts of a run.

    Args:
        directory: for everything, temporary files included.
        seed: of what happens.
        parts: those to run, of `log`, `replica` and `jobs`.
    """

    def __init__(self, directory: Path, seed: int, parts: Sequence[str]) -> None:
        self._seed = seed
        self.tables = {
            part: Tables(part, directory / part, random.Random(f"{seed} {part}"), savers)
            for part, savers in (("log", ("save", "save", "deltas", "publish")), ("replica", ()))
            if part in parts
        }
        self.jobs = Jobs(directory / "jobs", random.Random(f"{seed}")) if "jobs" in parts else None

    def run(self, minutes: float, events: int, log: Log) -> None:
        """Disturb until the time is over, or each part has had so many events.

        Raises:
            Breach: a promise did not hold.
        """
        acts = [Act(name, _of_tables(part), part.settle) for name, part in self.tables.items()]
        if self.jobs is not None:
            acts.append(Act("jobs", _of_jobs(self.jobs), self.jobs.settle))
        ended = threading.Event()
        threads = [
            threading.Thread(
                target=act.run,
                args=(ended, events, random.Random(f"{self._seed} {act.name}"), log),
                daemon=True,
            )
            for act in acts
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + minutes * 60
        while any(t.is_alive() for t in threads) and time.monotonic() < until:
            time.sleep(0.1)
        ended.set()
        for thread in threads:
            thread.join()
        for act in acts:
            if act.error is not None:
                told = "\n".join(act.last)
                raise Breach(f"{act.name}: {act.error}\nlast events:\n{told}") from act.error

    def figures(self) -> dict[str, Any]:
        """What was done and what was found."""
        made: dict[str, Any] = {}
        for name, part in self.tables.items():
            taken = sorted(part.figures.recoveries_s) or [0.0]
            found = asdict(part.figures)
            del found["recoveries_s"]
            made[name] = found | {
                "acknowledged": sum(a.acknowledged for a in part.accounts.values()),
                "unknown": sum(a.unknown for a in part.accounts.values()),
                "recovery_median_s": round(float(np.median(taken)), 2),
                "recovery_p99_s": round(float(np.quantile(taken, 0.99)), 2),
            }
        if self.jobs is not None:
            made["jobs"] = asdict(self.jobs.figures)
        kills = Counter[str]()
        for part in made.values():
            kills.update(part["kills"])
        return made | {"kills": dict(kills), "kills_in_all": kills.total()}

    def close(self) -> None:
        for part in (*self.tables.values(), self.jobs):
            if part is not None:
                part.close()


def _of_tables(part: Tables) -> dict[str, tuple[int, Callable[[], None]]]:
    deeds = {
        "kill shard": (6, part.kill_shard),
        "kill client": (6, part.kill_client),
        "pause shard": (2, part.pause_shard),
    }
    if part.saved:
        deeds |= {
            "kill saver": (4, part.kill_saver),
            "pause saver": (1, part.pause_saver),
            "reshard": (2, part.reshard),
        }
    return deeds


def _of_jobs(part: Jobs) -> dict[str, tuple[int, Callable[[], None]]]:
    return {
        "submit": (6, part.submit),
        "look": (4, part.look),
        "cancel": (2, part.cancel),
        "kill scheduler": (1, part.kill_scheduler),
        "kill node": (1, part.kill_node),
        "kill redis": (1, part.kill_redis),
        "pause": (1, part.pause),
    }


def soak(
    minutes: float,
    seed: int,
    parts: Sequence[str] = ("log", "replica", "jobs"),
    events: int = 1 << 30,
    log: IO[str] | None = None,
) -> dict[str, Any]:
    """A whole run; its figures.

    Raises:
        Breach: a promise did not hold, or something was left behind.
    """
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        tag = f"{os.getpid()}-{seed}"
        before = dict(os.environ)
        os.environ.update({TAG: tag, "TMPDIR": str(temporary)})
        tempfile.tempdir = None  # read anew
        shared = _shared_memory()
        began = time.monotonic()
        try:
            with Soak(Path(folder), seed, parts) as run:
                run.run(minutes, events, Log(log))
                figures = run.figures()
        finally:
            os.environ.clear()
            os.environ.update(before)
            tempfile.tempdir = None
        figures |= {"seed": seed, "minutes": round((time.monotonic() - began) / 60, 1)}
        _nothing_left(tag, temporary, shared)
    return figures | {"left_behind": 0}


def _nothing_left(tag: str, temporary: Path, shared: set[str]) -> None:
    until = time.monotonic() + _END_S
    while left := _processes(tag) + [str(path) for path in temporary.iterdir() if not _stays(path)]:
        if time.monotonic() > until:
            raise Breach(f"left behind: {left}")
        time.sleep(0.2)
    if more := {name for name in _shared_memory() - shared if "heterps" in name}:
        raise Breach(f"left in shared memory: {sorted(more)}")


def _stays(path: Path) -> bool:
    """Whether it is meant to: this user's cache of data, and PyTorch's own folder."""
    return path.name.startswith((f"heterps-{os.getuid()}-", "torchinductor"))


def _processes(tag: str) -> list[str]:
    """Processes of the run that have not ended, this one aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{TAG}={tag}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_text().replace("\0", " ")[:120])
        except OSError:
            continue  # it has ended, or is another user's
    return found


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def main() -> int:
    """One run, its figures printed and kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", nargs="+", default=["log", "replica", "jobs"])
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--events", type=Path, help="where a line for each goes")
    options = parser.parse_args()
    log = options.events.open("w") if options.events is not None else None
    try:
        figures = soak(options.minutes, options.seed, options.parts, log=log)
    except Breach as breach:
        print(f"BREACH: {breach}", file=sys.stderr)
        return 1
    text = json.dumps(figures | {"versions": _versions()}, indent=2) + "\n"
    print(text, end="")
    if options.figures is not None:
        options.figures.write_text(text)
    return 0


def _versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"python": platform.python_version(), "kernel": platform.release(), "commit": commit}


if __name__ == "__main__":
    sys.exit(main())
