"""Which of the ways to compute a product of `nn.Linear` is the fastest here, measured in turns.

What is timed is what a step would do: packing weights is part of it. A product goes another way
than torch's own only where that takes at least `GAIN` less; small ones, where that would be noise,
are torch's.
"""

import statistics
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from protos.decision_pb2 import LinearRoute
from workers.ops import linear
from workers.profiling.clock import QuietClock

GAIN = 0.05  # of torch's time
LEAST_FLOP = 5e7  # of a product: about 0.5 ms of a core
SMALLER = 8  # times fewer rows, measured besides: plans may cut steps smaller than a profile does
_ROUNDS = (5, 15)  # least and most
_MEASURED_S = 0.3  # that the rounds of one product may take


def choose(
    kind: str, seen: Iterable[tuple[int, int, int]], log: Callable[[str], None]
) -> list[LinearRoute]:
    """Measure layers; the routes of each that is large enough to be measured.

    Also where all of them are torch's, so that an earlier choice is known to have been made.

    Args:
        kind: name of this machine's resource type.
        seen: rows, inputs and outputs of layers.
    """
    if len(linear.available()) == 1:
        return []
    sizes = sorted({*seen, *((rows // SMALLER, *size) for rows, *size in seen)})
    return [
        _measured(kind, rows, inputs, outputs, log)
        for rows, inputs, outputs in sizes
        if 2.0 * rows * inputs * outputs >= LEAST_FLOP
    ]


def _measured(
    kind: str, rows: int, inputs: int, outputs: int, log: Callable[[str], None]
) -> LinearRoute:
    draw = torch.Generator().manual_seed(0)
    given = torch.rand(rows, inputs, generator=draw)
    weight = torch.rand(outputs, inputs, generator=draw)
    bias = torch.rand(outputs, generator=draw)
    grad = torch.rand(rows, outputs, generator=draw)
    products: dict[str, Callable[[str], Tensor]] = {
        "forward": lambda route: linear.forward(route, given, weight, bias),
        "grad_input": lambda route: linear.grad_input(route, grad, weight),
        "grad_weight": lambda route: linear.grad_weight(route, grad, given),
    }
    best: dict[str, str] = {}
    told = []
    for name, product in products.items():
        seconds = in_turns({route: partial(product, route) for route in linear.available()})
        plain = seconds[linear.TORCH]
        route = min(seconds, key=lambda one: seconds[one])
        best[name] = route if seconds[route] <= (1 - GAIN) * plain else linear.TORCH
        if best[name] != linear.TORCH:
            told.append(f"{name} {best[name]} {plain / seconds[route]:.2f}x")
    log(f"linear {inputs} -> {outputs}, {rows} rows: {', '.join(told) or 'torch'}")
    return LinearRoute(
        type=kind,
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        threads=torch.get_num_threads(),
        **best,
    )


@torch.no_grad()
def in_turns(contestants: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each, by turns, since machines drift."""
    clock = QuietClock()

    def timed(run: Callable[[], object]) -> float:
        begin = clock.now()
        run()
        return clock.now() - begin

    for run in contestants.values():
        run()  # allocates, and makes its kernel
    once = sum(timed(run) for run in contestants.values())
    rounds = min(max(int(_MEASURED_S / max(once, 1e-6)), _ROUNDS[0]), _ROUNDS[1])
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            taken[name].append(timed(run))
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
