"""Processes of one ring that sum without end until one of them is killed, stopped or leaves.

    python ring_ranks.py FOLDER WIDTH SEED HOW[,HOW]

A round for each rank: it goes at a moment that follows from the seed, and each other writes what it
was told to FOLDER/ROUND-RANK. HOW: kill, stop or raise, or some in turn, with commas between.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from protos.stage_pb2 import JoinReply, JoinRequest
from workers.errors import PeerLostError
from workers.links.all_reduce import StageGroup
from workers.links.ring_port import RingPort

HERE = "127.0.0.1"
SILENCE_S = 3


def join(folder: Path, round_: int, rank: int, width: int) -> StageGroup:
    """The group, each finding the next by way of a file."""
    port = RingPort(rank, width, HERE)
    reply = port.admit(JoinRequest(rank=(rank - 1) % width, size=width)).SerializeToString()
    file = folder / f"{round_}-{rank}.port"
    file.with_suffix(".part").write_bytes(reply)
    file.with_suffix(".part").rename(file)
    after = folder / f"{round_}-{(rank + 1) % width}.port"
    wait_for(after.is_file)
    reply = JoinReply.FromString(after.read_bytes())
    ring = port.join(reply, HERE, lambda: False, silence_s=SILENCE_S)
    return StageGroup(torch.device("cpu"), ring)


def sum_without_end(group: StageGroup, began: Path, how: str, victim: bool) -> str:
    """Two steps at a time; what ended it."""
    tensors = [torch.ones(3), torch.ones(700_001), torch.ones(5, dtype=torch.float64)]
    step = 0
    try:
        while True:
            totals = [group.begin_sum(step + i) for i in range(2)]
            mine = [[tensor.clone() for tensor in tensors] for _ in totals]
            for total, given in zip(totals, mine, strict=True):
                total.add(given)
            for total, given in zip(totals, mine, strict=True):
                total.wait()
                if any((tensor != group.size).any() for tensor in given):
                    return f"step {step}: a wrong sum"
            step += 2
            if step == 4:
                began.touch()
            if how == "raise" and victim and step > 20:
                return "raised"
    except PeerLostError:
        return "lost"
    finally:
        group.close()


def worker(folder: Path, round_: int, rank: int, width: int, how: str) -> None:
    """One process of one round."""
    signal.alarm(120)  # none outlives a parent that was killed
    torch.set_num_threads(1)
    group = join(folder, round_, rank, width)
    told = sum_without_end(group, folder / f"{round_}-{rank}.began", how, rank == round_)
    (folder / f"{round_}-{rank}").write_text(told)


def wait_for(ready: Callable[[], bool]) -> None:
    """Until it is so; the alarm ends what hangs."""
    while not ready():
        time.sleep(0.005)


def main() -> int:
    """All rounds; 0 where every process but those that were killed ended by itself."""
    signal.alarm(240)
    folder, width, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ways = sys.argv[4].split(",")
    moments = random.Random(seed)
    # Forked before any thread is there, so that torch is imported once.
    context = multiprocessing.get_context("fork")
    for victim in range(width):
        how = ways[victim % len(ways)]
        ranks = [
            context.Process(target=worker, args=(folder, victim, rank, width, how))
            for rank in range(width)
        ]
        for process in ranks:
            process.start()
        wait_for(lambda v=victim: all((folder / f"{v}-{r}.began").is_file() for r in range(width)))  # type: ignore[misc]
        time.sleep(moments.uniform(0, 0.05))
        if how != "raise":
            number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
            os.kill(ranks[victim].pid or 0, number)
        for rank, process in enumerate(ranks):
            if rank != victim or how == "raise":
                process.join()
                if process.exitcode:
                    return 1
        ranks[victim].kill()
        ranks[victim].join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
