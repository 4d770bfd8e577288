"""What a step's push costs: staged parts and a commit, beside a push of each table.

Each side makes steps of the same keys and gradients in turns, since machines drift: what is told
is the median time of a step, and the processor time that client and shards take for one. A push
of each table, by each worker, is what a step would cost without parts, and steps each row once a
worker.

    python -m bench.ps.steps [--rounds 30] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from ps import LocalShards, ParameterClient

TABLES = 8
DIM = 16
KEYS = 20_000  # of each table and worker
UNIVERSE = 200_000
SLOTS = 2
_WARM_UP = 5
Parts = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of a step.

    Attributes:
        way: how it was made.
        workers: how many had gradients.
        shards: of how many.
        where: shared memory, or gRPC.
        median_ms: on the clock.
        cpu_ms: of all processes, on average.
    """

    way: str
    workers: int
    shards: int
    where: str
    median_ms: float
    cpu_ms: float


def _parts(seed: int, prefix: str) -> Parts:
    rng = np.random.default_rng(seed)
    made: Parts = {}
    for table in range(TABLES):
        keys = rng.choice(UNIVERSE, KEYS, replace=False).astype(np.uint64)
        grads = rng.normal(size=(KEYS, DIM)).astype(np.float32)
        made[f"{prefix}{table}"] = (keys, grads)
    return made


def _ways(clients: list[ParameterClient], parts: list[Parts]) -> dict[str, Callable[[int], None]]:
    leader, slots = clients[0], len(clients)

    def push(step: int) -> None:
        del step
        waiting = [
            client.push_async(table, keys, grads, distinct=True)
            for client, part in zip(clients, parts, strict=True)
            for table, (keys, grads) in part.items()
        ]
        for future in waiting:
            future.result()

    def stage(step: int) -> None:
        waiting = [
            client.stage_async("steps", step, slot, part, distinct=True)
            for slot, (client, part) in enumerate(zip(clients, parts, strict=True))
        ]
        for future in waiting:
            future.result()

    def commit(step: int) -> None:
        stage(step)
        leader.tally("steps", step, slots)
        leader.commit_async("steps", step, slots).result()

    def carry(step: int) -> None:
        leader.commit_async("steps", step, 1, parts=parts[0], distinct=True).result()

    made = {"a push of each table": push, "parts, tally, commit": commit}
    return made | ({"commit that carries its part": carry} if slots == 1 else {})


def measure(workers: int, shards: int, shared_memory: bool, rounds: int) -> list[Cost]:
    """What a step costs each way."""
    with LocalShards(shards) as running:
        clients = [
            ParameterClient(running.addresses, shared_memory=shared_memory) for _ in range(workers)
        ]
        parts = [_parts(worker, "t") for worker in range(workers)]
        for table in parts[0]:
            clients[0].create_table(table, DIM, optimizer="adagrad")
        ways = _ways(clients, parts)
        times: dict[str, list[float]] = {way: [] for way in ways}
        used = dict.fromkeys(ways, 0.0)
        step = 0
        for turn in range(rounds + _WARM_UP):
            for way, make in ways.items():
                step += 1
                before, began = _cpu_seconds(clients[0]), time.perf_counter()
                make(step)
                seconds = time.perf_counter() - began
                if turn >= _WARM_UP:
                    times[way].append(seconds)
                    used[way] += _cpu_seconds(clients[0]) - before
        for client in clients:
            client.close()
    where = "shared memory" if shared_memory else "gRPC"
    return [
        Cost(
            way,
            workers,
            shards,
            where,
            round(1e3 * statistics.median(seconds), 2),
            round(1e3 * used[way] / rounds, 2),
        )
        for way, seconds in times.items()
    ]


def _cpu_seconds(client: ParameterClient) -> float:
    return time.process_time() + sum(shard.cpu_seconds for shard in client.stats())


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.ps.steps", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", default="", metavar="FILE")
    options = parser.parse_args()
    costs = []
    print(f"{TABLES} tables, {KEYS} keys of dim {DIM} each, Adagrad")
    for workers in (1, SLOTS):
        for shards in (1, 2):
            for shared_memory in (True, False):
                for cost in measure(workers, shards, shared_memory, options.rounds):
                    costs.append(cost)
                    print(
                        f"{cost.workers} workers {cost.shards} shards {cost.where:14}"
                        f"{cost.way:30}{cost.median_ms:9.2f} ms"
                        f"{cost.cpu_ms:9.2f} ms of processors",
                        flush=True,
                    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(cost) for cost in costs], file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
