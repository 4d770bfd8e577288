"""No peer: the dense layers alone, as two workers compute them, and the machine's best products.

Two processes of a thread, half of every batch each, at once: forward and backward, by the routes
that a worker would choose here (`train.linear: auto`), with memory as workers have it. A turn says
what these reach in a second of a processor, and what the fastest single product of the layers does:
the rate that there is to have.
"""

import json
import os
import statistics
import sys
import time
from itertools import pairwise

import torch

from bench.ctr.peers.torch_net import tower
from bench.ctr.shape import BATCH, CHECKED, WIDTHS
from bench.ps.peers import children
from chassis.memory import keep_buffers
from workers.device.units import compute_environment
from workers.ops import linear, routed_linear
from workers.profiling.linear import choose, products

_PROCESSES = 2
_ROWS = BATCH // _PROCESSES
_ROUNDS = 7  # of each single product in a turn
# Of a batch: three products of each layer.
FLOP = 3 * 2.0 * BATCH * sum(inputs * outputs for inputs, outputs in pairwise(WIDTHS))


class _Layers:
    """Half of the batches' dense layers."""

    def __init__(self) -> None:
        keep_buffers()
        sizes = {linear.Shape(_ROWS, inputs, outputs) for inputs, outputs in pairwise(WIDTHS)}
        self._tower = tower()
        routed_linear.route(self._tower, linear.Routes(choose("cpu", [sizes], lambda text: None)))
        self._given = torch.randn(_ROWS, WIDTHS[0], requires_grad=True)

    def turn(self, seconds: float) -> dict[str, float]:
        """Steps of so many seconds, then single products."""
        began, used, steps = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < seconds:
            self.step()
            steps += 1
        taken, used = time.perf_counter() - began, time.process_time() - used
        return {"steps_per_s": steps / taken, "cpu_s": used / steps, "best": _best_rate()}

    def step(self) -> None:
        self._tower.zero_grad(set_to_none=True)
        self._given.grad = None
        self._tower(self._given).mean().backward()


@torch.no_grad()
def _best_rate() -> float:
    """FLOP in a processor second of the fastest product, by whichever route."""
    found = 0.0
    for inputs, outputs in pairwise(WIDTHS[:-1]):
        for product in products(_ROWS, inputs, outputs).values():
            for route in linear.available():
                product(route)
                seconds = []
                for _ in range(_ROUNDS):
                    began = time.process_time()
                    product(route)
                    seconds.append(time.process_time() - began)
                flop = 2.0 * _ROWS * inputs * outputs
                found = max(found, flop / statistics.median(seconds))
    return found


def _second() -> None:
    layers = _Layers()
    children.announce()
    for line in sys.stdin:
        print(json.dumps(layers.turn(json.loads(line)["seconds"])), flush=True)


def main() -> None:
    if sys.argv[1:] == ["--second"]:
        _second()
        return
    other = children.start("bench.ctr.peers.dense", ["--second"])
    other.wait_ready()
    assert other.process.stdin is not None
    assert other.process.stdout is not None
    layers = _Layers()
    for _ in range(CHECKED):
        layers.step()
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        seconds = json.loads(line)["seconds"]
        other.process.stdin.write(json.dumps({"seconds": seconds}) + "\n")
        other.process.stdin.flush()
        both = [layers.turn(seconds), json.loads(other.process.stdout.readline())]
        rate = sum(one["steps_per_s"] for one in both) * _ROWS
        answer = {
            "samples_per_s": rate,
            "cpu_s": sum(one["cpu_s"] for one in both),
            "flop_per_cpu_s": FLOP / sum(one["cpu_s"] for one in both),
            "best_flop_per_cpu_s": statistics.fmean(one["best"] for one in both),
        }
        print(json.dumps(answer), flush=True)
    other.stop()
    os._exit(0)


if __name__ == "__main__":
    own = compute_environment()
    if not own.items() <= os.environ.items():  # glibc reads its own when a program begins
        command = [sys.executable, "-m", "bench.ctr.peers.dense", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **own})
    main()
