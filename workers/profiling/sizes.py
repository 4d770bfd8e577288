"""Which micro-batch a profile's costs are of: the one that a worker will get.

Where the job fixes the micro-batches of a step, that is it. Else the plan chooses, and the costs
are of the smallest one that is worth having: a layer takes part of its time whatever the size, so
smaller ones take longer a sample. How much that part is goes with the costs, for plans whose
micro-batches are smaller still.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.profiling.timing import LayerTimer, first_of

MAX_SAMPLES = 2048  # of a micro-batch where the job leaves the size open, and of rows at once
WASTE = 0.1  # that a sample may take longer in a small micro-batch
_HALVINGS = 5  # of the largest one
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Worth:
    """The smallest micro-batch that is worth having.

    Args:
        samples: of it.
        fixed_s: that each layer takes of any that is no larger, float64 [layers].
    """

    samples: int
    fixed_s: NDArray[np.float64]


def fixed_size(batch: int, micro_batches: int) -> int:
    """Samples of the largest of a step's micro-batches."""
    return -(-batch // micro_batches)


def smallest_worth_having(
    timer: LayerTimer,
    batches: Sequence[Mapping[str, Tensor]],
    samples: int,
    log: Callable[[str], None],
) -> Worth:
    """Time smaller and smaller micro-batches; the smallest of which a sample costs no more.

    Args:
        samples: of the largest one.
    """
    sizes = [samples]
    while len(sizes) <= _HALVINGS and sizes[-1] >= 4:
        sizes.append(sizes[-1] // 2)
    seconds = {}  # a micro-batch takes, by layer
    for size in sizes:
        parts = [first_of(batch, size) for batch in batches[: _REPEATS + 1]]
        seconds[size] = np.median(timer.time(parts)[1:, :, :2].sum(axis=2), axis=0)
    a_sample = {size: float(taken.sum()) / size for size, taken in seconds.items()}
    log(
        "a sample takes "
        + ", ".join(f"{s * 1e6:.1f} us in micro-batches of {n}" for n, s in a_sample.items())
    )
    least = min(a_sample.values())
    chosen = min(size for size, taken in a_sample.items() if taken <= (1 + WASTE) * least)
    upto = max(chosen, *sizes[-2:])
    return Worth(chosen, _fixed_s({n: taken for n, taken in seconds.items() if n <= upto}))


def _fixed_s(seconds: Mapping[int, NDArray[np.float64]]) -> NDArray[np.float64]:
    """What layers take of a micro-batch of any size: lines through their times by size."""
    sizes, taken = np.array(list(seconds), np.float64), np.array(list(seconds.values()))
    if len(sizes) < 2:
        return np.zeros(taken.shape[1])
    found = []
    for layer in np.maximum(taken, 1e-9).T:  # misses count by their share of the time
        terms = np.stack([1 / layer, sizes / layer], axis=1)
        fixed, _ = np.linalg.lstsq(terms, np.ones(len(sizes)), rcond=None)[0]
        found.append(min(max(0.0, fixed), layer.min()))
    return np.array(found)
