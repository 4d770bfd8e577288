"""Which micro-batch a profile's costs are of: the one that a worker will get.

Where the job fixes the micro-batches of a step, that is it. Else the plan chooses, and the costs
are of the smallest one that is worth having: a layer takes part of its time whatever the size, so
smaller ones take longer a sample.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor

from workers.profiling.timing import LayerTimer, first_of

MAX_SAMPLES = 2048  # of a micro-batch where the job leaves the size open, and of rows at once
WASTE = 0.1  # that a sample may take longer in a small micro-batch
_HALVINGS = 5  # of the largest one
_REPEATS = 3


def fixed_size(batch: int, micro_batches: int) -> int:
    """Samples of the largest of a step's micro-batches."""
    return -(-batch // micro_batches)


def smallest_worth_having(
    timer: LayerTimer,
    batches: Sequence[Mapping[str, Tensor]],
    samples: int,
    log: Callable[[str], None],
) -> int:
    """Time smaller and smaller micro-batches; the samples of the smallest that costs no more.

    Args:
        samples: of the largest one.
    """
    sizes = [samples]
    while len(sizes) <= _HALVINGS and sizes[-1] >= 4:
        sizes.append(sizes[-1] // 2)
    seconds = {}
    for size in sizes:
        parts = [first_of(batch, size) for batch in batches[: _REPEATS + 1]]
        taken = timer.time(parts)[1:, :, :2].sum(axis=(1, 2))
        seconds[size] = float(np.median(taken)) / size
    log(
        "a sample takes "
        + ", ".join(f"{s * 1e6:.1f} us in micro-batches of {n}" for n, s in seconds.items())
    )
    least = min(seconds.values())
    return min(size for size, taken in seconds.items() if taken <= (1 + WASTE) * least)
