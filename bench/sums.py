"""Sums among the workers of a stage on one host: our ring against gloo, which is in the clear.

Between workers of one host the ring is of Unix sockets; between hosts it is under TLS, or over
plain TCP where that is allowed. The contestants take turns in one run, since machines drift; the
figures to read are the ratios, of the time that a sum takes and of what all workers' processors do.

    python -m bench.sums [--rounds 7] [--json FILE]
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.pages import RESULTS, machine, versions, write
from chassis.security import Security
from heterps.home import certs
from protos.stage_pb2 import JoinReply, JoinRequest
from workers.links.all_reduce import Rendezvous, StageGroup
from workers.links.ring_port import RingPort

WIDTHS = (2, 4, 8)
SIZES = (1 << 10, 1 << 20, 64 << 20)  # bytes
GLOO, RING, TCP, TLS = "gloo", "ring", "ring over TCP", "ring under TLS"
_LOOPBACK = "127.0.0.1"
_ROUND_S = 0.5


def ring_group(rank: int, size: int, store: Any, name: str, security: Security) -> StageGroup:
    """The group of all processes, made by way of a store of torch's."""
    port = RingPort(rank, size, _LOOPBACK, security)
    admitted = port.admit(JoinRequest(rank=(rank - 1) % size, size=size))
    store.set(f"{name}/{rank}", admitted.SerializeToString())
    after = JoinReply.FromString(store.get(f"{name}/{(rank + 1) % size}"))
    if name != RING:
        after.name = ""  # no Unix socket
    return StageGroup(torch.device("cpu"), port.join(after, _LOOPBACK, lambda: False))


def sum_on(group: StageGroup, values: Tensor) -> None:
    """One step's sum."""
    group.sum_gradients([], (), [values])


def measure(sum_: Callable[[Tensor], object], size: int, repeats: int) -> tuple[float, float]:
    """Seconds of a sum of so many bytes, and those of processors in all workers together."""
    values = torch.zeros(size // 4)
    sum_(values)
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        sum_(values)
    took = (time.perf_counter() - began) / repeats
    of_all = torch.tensor((time.process_time() - busy) / repeats)
    dist.all_reduce(of_all)
    return took, of_all.item()


def worker(rank: int, size: int, address: str, rounds: int, files: str, results: Any) -> None:
    """One process; rank 0 reports."""
    torch.set_num_threads(1)
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(minutes=5))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ours = {
        RING: ring_group(rank, size, store, RING, Security()),
        TCP: ring_group(rank, size, store, TCP, Security()),
        TLS: ring_group(
            rank, size, store, TLS, Security.from_files(certs.environment(Path(files)))
        ),
    }
    sums: dict[str, Callable[[Tensor], object]] = {
        GLOO: dist.all_reduce,
        **{name: partial(sum_on, group) for name, group in ours.items()},
    }
    for bytes_ in SIZES:
        repeats: dict[str, int] = {}
        for name, sum_ in sums.items():
            once = torch.tensor(measure(sum_, bytes_, 1)[0])
            dist.all_reduce(once, dist.ReduceOp.MAX)  # all are to repeat alike
            repeats[name] = max(1, int(_ROUND_S / once.item()))
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in sums}
        for _ in range(rounds):
            for name, sum_ in sums.items():
                took[name].append(measure(sum_, bytes_, repeats[name]))
        if rank == 0:
            results.put((bytes_, took))
    for group in ours.values():
        group.close()
    dist.barrier()
    dist.destroy_process_group()


def compared(width: int, bytes_: int, took: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    """Medians of all rounds, and of gloo's part of ours in each round."""
    print(f"{width} workers, {bytes_:>10,} bytes:", end="")
    of: dict[str, Any] = {"workers": width, "bytes": bytes_}
    for number, kind in enumerate(("seconds", "cpu_seconds")):
        rounds = {name: [each[number] for each in of_name] for name, of_name in took.items()}
        of[kind] = {name: statistics.median(values) for name, values in rounds.items()}
        of[f"gloo_over_{kind}"] = ratios = {
            name: [g / one for g, one in zip(rounds[GLOO], values, strict=True)]
            for name, values in rounds.items()
            if name != GLOO
        }
        for name, value in of[kind].items():
            print(f"  {name} {1e3 * value:.3f} ms", end="")
            if name in ratios:
                print(f" (x {statistics.median(ratios[name]):.2f})", end="")
        print("; processors:" if number == 0 else "", end="")
    print(flush=True)
    return of


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="bench.sums", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=RESULTS / "sums.json")
    options = parser.parse_args()
    found = []
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as files:
        certs.make(Path(files))
        for width in WIDTHS:
            meeting, results = Rendezvous(_LOOPBACK), context.Queue()
            processes = [
                context.Process(
                    target=worker,
                    args=(rank, width, meeting.address, options.rounds, files, results),
                )
                for rank in range(width)
            ]
            for process in processes:
                process.start()
            for _ in SIZES:
                found.append(compared(width, *results.get(timeout=600)))
            for process in processes:
                process.join(60)
    document = {"machine": machine(), "versions": versions(), "sums": found}
    write(options.json, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
