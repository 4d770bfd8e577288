"""Rows of several tables: a message for each table, side by side, against one for all.

Both take turns in one run, since machines drift; the figures to read are the ratios, of the time of
a pull and of what the processors of client and shards do for it.

    python -m bench.tables [--rounds 9] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.pages import RESULTS, machine, versions, write
from ps import LocalShards, ParameterClient

SHARDS = 2
EACH, TOGETHER = "a message a table", "one message"
_ROUND_S = 0.7
Keys = Mapping[str, NDArray[np.uint64]]


@dataclass(frozen=True, slots=True)
class Model:
    """The tables that a step looks up.

    Attributes:
        name: of it.
        dims: of each table.
        keys: distinct ones of each in a step.
    """

    name: str
    dims: tuple[int, ...]
    keys: int


MODELS = (
    Model("flights", (8, 1), 4000),
    Model("26 tables", (16,) * 26, 1000),
    Model("26 small tables", (8,) * 26, 64),
)


def one_by_one(client: ParameterClient, pool: ThreadPoolExecutor, keys: Keys) -> None:
    """Each table by a message of its own, all under way at once."""
    for one in [pool.submit(client.pull_unique, table, some) for table, some in keys.items()]:
        one.result()


def together(client: ParameterClient, keys: Keys) -> None:
    """All tables by one message a shard."""
    client.pull_many(keys, distinct=True)


def measure(
    client: ParameterClient, pull: Callable[[], None], seconds: float
) -> tuple[float, float]:
    """Seconds of a pull, and those of all processors for it."""
    pull()
    busy = -sum(s.cpu_seconds for s in client.stats()) - time.process_time()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        pull()
        count += 1
    took = time.perf_counter() - began
    busy += time.process_time() + sum(s.cpu_seconds for s in client.stats())
    return took / count, busy / count


def compared(model: Model, way: str, shards: LocalShards, rounds: int) -> dict[str, Any]:
    """Medians of all rounds, and of one message's part of the others in each round."""
    with (
        ParameterClient(shards.addresses, shared_memory=way == "shared memory") as client,
        ThreadPoolExecutor(len(model.dims)) as pool,
    ):
        rng = np.random.default_rng(0)
        keys: dict[str, NDArray[np.uint64]] = {}
        for number, dim in enumerate(model.dims):
            table = f"{model.name.replace(' ', '_')}.{way.replace(' ', '_')}.{number}"
            client.create_table(table, dim)
            drawn = rng.choice(1 << 40, model.keys * 2).astype(np.uint64)
            keys[table] = np.unique(drawn)[: model.keys]
            client.push(table, keys[table], np.ones((len(keys[table]), dim), np.float32))
        pulls = {
            EACH: partial(one_by_one, client, pool, keys),
            TOGETHER: partial(together, client, keys),
        }
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in pulls}
        for _ in range(rounds):
            for name, pull in pulls.items():
                took[name].append(measure(client, pull, _ROUND_S))
    of: dict[str, Any] = {"model": model.name, "way": way, "tables": len(model.dims)}
    for number, kind in enumerate(("seconds", "cpu_seconds")):
        values = {name: [each[number] for each in of_name] for name, of_name in took.items()}
        of[kind] = {name: statistics.median(some) for name, some in values.items()}
        of[f"{kind}_ratio"] = statistics.median(
            one / each for one, each in zip(values[TOGETHER], values[EACH], strict=True)
        )
    shown = ", ".join(
        f"{1e3 * of['seconds'][name]:.3f} ms ({1e3 * of['cpu_seconds'][name]:.3f} of processors)"
        for name in pulls
    )
    print(f"{model.name} by {way}: {shown}; x {of['seconds_ratio']:.2f}", end="")
    print(f" of the time, x {of['cpu_seconds_ratio']:.2f} of processors", flush=True)
    return of


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="bench.tables", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS / "tables.json")
    options = parser.parse_args()
    with LocalShards(SHARDS) as shards:
        found = [
            compared(model, way, shards, options.rounds)
            for model in MODELS
            for way in ("shared memory", "gRPC")
        ]
    document = {"machine": machine(), "versions": versions("grpcio", "numpy"), "tables": found}
    write(options.json, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
