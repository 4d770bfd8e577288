"""Whether a forward heeds how far off other samples are: found by some that are.

One may scale, clip or skip a whole micro-batch where any value of it is too large, which no usual
sample shows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from workers.model.chain.trace import TracedModel
from workers.model.checks.trial import Layers, detached, given_to, run
from workers.model.module.randomness import Draws
from workers.model.module.tried import tried

_FAR = 1000.0  # times as large
_TOLERANCE = 1e-4  # of the largest value of usual samples


def heeds_outliers(traced: TracedModel, batch: Mapping[str, Tensor], samples: int) -> bool:
    """Whether what is computed of the first samples is something else where others are far off.

    Args:
        batch: twice as many.

    Raises:
        Exception: what the model raises for usual ones.
    """
    layers = _Outliers(traced, samples)
    with tried(traced.model), torch.no_grad():
        usual = layers.run(*given_to(traced, batch))
    if layers.found:
        return True
    try:
        odd = run(traced, {name: _outlying(value, samples) for name, value in batch.items()})
    except Exception:
        return False  # such numbers may be none that it takes
    return not alike(usual, odd, samples)


def _outlying(value: Any, samples: int) -> Any:
    """The same with other values behind the first samples, where it has rows of samples."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim):
        return value
    if len(value) != 2 * samples or value.layout != torch.strided:
        return value
    return torch.cat([value[:samples], value[samples:] * _FAR])


def alike(one: Any, other: Any, samples: int) -> bool:
    """Whether tensors with rows of samples are the same for the first ones."""
    some, others = (
        [v for v in tree_leaves(values) if isinstance(v, Tensor)] for values in (one, other)
    )
    return len(some) == len(others) and all(
        a.shape == b.shape and close(a[:samples], b[:samples])
        for a, b in zip(some, others, strict=True)
        if a.ndim and len(a) == 2 * samples and a.layout == torch.strided
    )


def close(one: Tensor, other: Tensor) -> bool:
    """Whether they are alike but for rounding: a layer may compute for some of the samples."""
    if not one.numel() or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    largest = float(one.abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(one, other, 0, _TOLERANCE * largest, equal_nan=True)


class _Outliers(Layers):
    """Notes whether a layer gives something else for the first samples if others are far off."""

    def __init__(self, traced: TracedModel, samples: int) -> None:
        super().__init__(traced, varied=True)
        self.found = False
        self._samples = samples

    def call_layer(
        self,
        layer: str,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        others: Mapping[Tensor, Tensor],
    ) -> Any:
        """What a layer gives for the samples as they are."""
        odd = tree_map(lambda value: _outlying(value, self._samples), (args, kwargs))
        draws = Draws.now()
        try:
            other = detached(module(*odd[0], **odd[1]))
        except Exception:
            other = None  # such numbers may be none that it takes
        draws.again()
        result = module(*args, **kwargs)
        if other is not None:
            self.found = self.found or not alike(result, other, self._samples)
        return result
