"""Which of the ways to compute a product of `nn.Linear` is the fastest here, measured in turns.

What is timed is what a step would do: packing weights is part of it. A product goes another way
than torch's own only where that takes at least `GAIN` less; small ones, where that would be noise,
are torch's.
"""

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from protos.decision_pb2 import LinearRoute
from workers.ops import linear
from workers.ops.linear import Shape
from workers.profiling.clock import QuietClock

GAIN = 0.05  # of torch's time
LEAST_FLOP = 5e7  # of a product: about 0.5 ms of a core
SMALLER = 8  # times fewer rows, measured besides: plans may cut steps smaller than a profile does
_ROUNDS = (5, 9)  # least and most
_MEASURED_S = 0.15  # that the rounds of one product may take


def choose(
    kind: str, seen: Sequence[Collection[Shape]], log: Callable[[str], None]
) -> list[LinearRoute]:
    """Measure layers; the routes of each that is large enough to be measured.

    Also where all of them are torch's, so that an earlier choice is known to have been made.

    Args:
        kind: name of this machine's resource type.
        seen: the layers that each of some equally large batches went through. Where their rows
            differ, as of lists of any length, oneDNN would make a kernel each time, which takes
            about a millisecond: it is no choice there.
    """
    here = linear.available()
    if len(here) == 1:
        return []
    of_any_rows = [route for route in here if route != linear.ONEDNN]
    even, uneven = _by_evenness(seen)
    routes = dict.fromkeys(uneven, of_any_rows) | dict.fromkeys(even, here)
    smaller = {one._replace(rows=one.rows // SMALLER): some for one, some in routes.items()}
    return [
        _measured(kind, size, some, log)
        for size, some in sorted((smaller | routes).items())
        if 2.0 * math.prod(size) >= LEAST_FLOP
    ]


def _by_evenness(seen: Sequence[Collection[Shape]]) -> tuple[list[Shape], list[Shape]]:
    """Layers whose rows are as many in every batch; and others, at their median of rows."""
    of_batches = []
    for batch in seen:
        rows: dict[tuple[int, int], set[int]] = {}
        for one in batch:
            rows.setdefault((one.inputs, one.outputs), set()).add(one.rows)
        of_batches.append(rows)
    even: list[Shape] = []
    uneven: list[Shape] = []
    for size in dict.fromkeys(size for one in of_batches for size in one):
        first, *others = (one.get(size, set()) for one in of_batches)
        if all(other == first for other in others):
            even += [Shape(number, *size) for number in first]
        else:
            every = [number for one in of_batches for number in one.get(size, ())]
            uneven.append(Shape(statistics.median_high(every), *size))
    return even, uneven


def _measured(
    kind: str, size: Shape, routes: Collection[str], log: Callable[[str], None]
) -> LinearRoute:
    rows, inputs, outputs = size
    best: dict[str, str] = {}
    told = []
    for name, product in products(rows, inputs, outputs).items():
        seconds = _medians({route: partial(product, route) for route in routes})
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


def products(rows: int, inputs: int, outputs: int) -> dict[str, Callable[[str], Tensor]]:
    """The three of a layer, each by its route, of numbers drawn."""
    draw = torch.Generator().manual_seed(0)
    given = torch.rand(rows, inputs, generator=draw)
    weight = torch.rand(outputs, inputs, generator=draw)
    bias = torch.rand(outputs, generator=draw)
    grad = torch.rand(rows, outputs, generator=draw)
    return {
        "forward": lambda route: linear.forward(route, given, weight, bias),
        "grad_input": lambda route: linear.grad_input(route, grad, weight),
        "grad_weight": lambda route: linear.grad_weight(route, grad, given),
    }


def in_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each, by round, as on a machine that does nothing else: machines drift.

    A round before, which is not told, allocates memory and makes kernels.
    """
    clock = QuietClock()
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            begin = clock.now()
            run()
            if number:
                taken[name].append(clock.now() - begin)
    return taken


@torch.no_grad()
def _medians(contestants: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each, from as many rounds as there is time for."""
    once = sum(one for (one,) in in_turns(contestants, 1).values())
    rounds = min(max(int(_MEASURED_S / max(once, 1e-6)), _ROUNDS[0]), _ROUNDS[1])
    taken = in_turns(contestants, rounds)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
