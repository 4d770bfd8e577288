"""A stage's sums begun while the step's last backward runs, against sums that begin after it.

Workers take the same steps by turns in either way, over Unix sockets as on one host, and over TCP
with as many bytes a second as a slow network has; the figure to read is the ratio. Layers whose
backward sleeps leave the processor to the sums, as a GPU does; those that compute share it.

    python -m bench.overlap [--rounds 7] [--json FILE]
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.pages import RESULTS, machine, versions, write
from bench.sums import RING, ring_group
from chassis.security import Security
from protos.job_pb2 import JobSpec
from workers.links.all_reduce import Rendezvous, StageGroup
from workers.model.module.statistics import RunningStatistics
from workers.stage.steps.schedule import Schedule
from workers.stage.update.update import Update
from workers.stage.update.versions import Versions

PACED = "1 Gbit/s"
_LAYERS = 16
_SIDE = 1024  # of a layer's weights, of 4 MiB
_SAMPLES = 256
_PACE = 125_000_000  # bytes a second of a link
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE, which `socket` does not name
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Case:
    """A stage and its model.

    Args:
        sleep_s: that a layer's backward sleeps; 0: it computes.
    """

    workers: int
    transport: str
    sleep_s: float


CASES = [
    Case(workers, *how)
    for workers in (2, 4)
    for how in ((RING, 0.02), (RING, 0.0), (PACED, 0.05), (PACED, 0.0))
]


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sleep_s: float) -> Tensor:
        ctx.sleep_s = sleep_s
        ctx.shape = weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.sleep_s)
        return gradient, torch.ones(ctx.shape), None


class Sleeping(nn.Module):
    """A layer whose backward sleeps."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_SIDE, _SIDE))
        self._sleep_s = sleep_s

    def forward(self, x: Tensor) -> Tensor:
        """The same values."""
        slept: Tensor = _Slept.apply(x, self.weight, self._sleep_s)  # type: ignore[no-untyped-call]
        return slept


def model_of(case: Case) -> nn.Module:
    """A stage's layers."""
    if case.sleep_s:
        return nn.Sequential(*(Sleeping(case.sleep_s) for _ in range(_LAYERS)))
    return nn.Sequential(*(nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(_LAYERS)))


def step_s(model: nn.Module, update: Update, step: int, overlapped: bool) -> float:
    """Seconds from the beginning of the last backward until the sums are there."""
    x, zero = torch.ones(_SAMPLES, _SIDE, requires_grad=True), torch.zeros((), dtype=torch.float64)
    loss = model(x).sum()
    dist.barrier()
    began = time.perf_counter()
    if overlapped:
        update.watch(step)
    loss.backward()
    gradient = update.gather(step, zero, None)
    update.report(gradient)
    took = time.perf_counter() - began
    update.skip(gradient)
    return took


def steps_of(case: Case, group: StageGroup, rounds: int) -> list[tuple[float, float]]:
    """Of each round the seconds overlapped and after."""
    model = model_of(case)
    schedule = Schedule(2 * rounds + 4, lambda step: _SAMPLES, 1)
    job = JobSpec()
    job.train.optimizer.name = "sgd"
    update = Update(
        job, model, group, RunningStatistics(model, group.size), schedule, Versions(model, 0)
    )
    took = [
        (
            step_s(model, update, 2 * number, True),
            step_s(model, update, 2 * number + 1, False),
        )
        for number in range(rounds + 1)
    ]
    return took[1:]  # the first step learns and does not overlap


def worker(rank: int, case: Case, address: str, rounds: int, results: Any) -> None:
    """One process; rank 0 reports."""
    torch.set_num_threads(1)
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(minutes=5))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.workers)
    group = ring_group(rank, case.workers, store, case.transport, Security())
    if case.transport == PACED:
        assert group._ring is not None
        group._ring._after.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, _PACE)
    took = steps_of(case, group, rounds)
    if rank == 0:
        results.put(took)
    group.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="bench.overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=RESULTS / "overlap.json")
    options = parser.parse_args()
    found = []
    context = multiprocessing.get_context("spawn")
    for case in CASES:
        meeting, results = Rendezvous(_LOOPBACK), context.Queue()
        processes = [
            context.Process(
                target=worker,
                args=(rank, case, meeting.address, options.rounds, results),
            )
            for rank in range(case.workers)
        ]
        for process in processes:
            process.start()
        took = results.get(timeout=600)
        for process in processes:
            process.join(60)
        overlapped, after = (statistics.median(each) for each in zip(*took, strict=True))
        ratios = [first / second for first, second in took]
        found.append(
            {
                **asdict(case),
                "overlapped_s": overlapped,
                "after_s": after,
                "overlapped_over_after": ratios,
            }
        )
        print(
            f"{case}: overlapped {1e3 * overlapped:.0f} ms, after {1e3 * after:.0f} ms, "
            f"x {statistics.median(ratios):.2f}",
            flush=True,
        )
    document = {"machine": machine(), "versions": versions("torch"), "steps": found}
    write(options.json, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
