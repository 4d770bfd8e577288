"""What every peer's process does alike: it trains when told to, and says how fast that was.

Called as `MODULE DATA THREADS ROWS`: it first trains a few steps and leaves what they made of some
rows in the file ROWS, for the check. Its standard output belongs to the answers alone.
Interpreters of other systems import this: it needs NumPy alone.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.ctr.shape import BATCH, CHECKED, Data
from bench.watch import used_s

# Rows [B, slots], numbers [B, dense], labels [B].
Arrays = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]


def given_data() -> Path:
    """The file with the samples."""
    return Path(sys.argv[1])


def given_threads() -> int:
    """On how many to compute."""
    return int(sys.argv[2])


def arrays(path: Path, part: int = 0, parts: int = 1) -> list[Arrays]:
    """The samples by step; of each a part."""
    data = Data.load(path)
    found = []
    for at in range(0, len(data.labels), BATCH):
        own = slice(at + BATCH * part // parts, at + BATCH * (part + 1) // parts)
        found.append((data.rows[own], data.dense[own], data.labels[own]))
    return found


@dataclass(frozen=True, slots=True)
class Trainer:
    """The network as a peer has it.

    Attributes:
        step: trains on the batch of a number, from 0 on; its loss.
        read: rows of numbers as they are then, [n, dim].
        workers: processes whose time counts beside this one's.
        servers: likewise, of those that hold rows alone.
        settle: waits for what steps left under way.
        threads: has a turn compute on so many; None: it cannot.
    """

    step: Callable[[int], float]
    read: Callable[[NDArray[np.int64]], Any]
    workers: Sequence[int] = ()
    servers: Sequence[int] = ()
    settle: Callable[[], None] = lambda: None
    threads: Callable[[int], None] | None = None


def serve(make: Callable[[], Trainer]) -> None:
    """Make a trainer, and answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what libraries print

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    trainer = make()
    losses = [trainer.step(number) for number in range(CHECKED)]
    rows = trainer.read(Data.load(given_data()).checked())
    np.save(sys.argv[3], np.asarray(rows, np.float32))
    answer({"losses": losses})
    number = CHECKED
    for line in sys.stdin:
        command = json.loads(line)
        if trainer.threads is not None:
            trainer.threads(command.get("threads") or given_threads())
        own, others = _own() + sum(map(used_s, trainer.workers)), sum(map(used_s, trainer.servers))
        began, first = time.perf_counter(), number
        while time.perf_counter() - began < command["seconds"]:
            trainer.step(number)
            number += 1
        trainer.settle()
        taken, steps = time.perf_counter() - began, number - first
        turn = {"samples_per_s": steps * BATCH / taken}
        turn["cpu_s"] = (_own() + sum(map(used_s, trainer.workers)) - own) / steps
        if trainer.servers:
            turn["server_cpu_s"] = (sum(map(used_s, trainer.servers)) - others) / steps
        answer(turn)
    os._exit(0)  # some libraries do not end their threads


def _own() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime
