"""Random numbers of a training: they follow from seed, step, micro-batch and layer alone.

So dropout, jitter and noise are the same wherever the model is cut and whichever worker computes
a micro-batch.
"""

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import nn

from workers.moe.gate import Gate

_MASK = (1 << 64) - 1


class LayerStart(nn.Module):
    """Stands in a stage's graph before the operations of a layer; seeds what they draw from.

    Outside a training, that is before `seed_from`, it does nothing.

    Args:
        layer: its name.
    """

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer
        self.seed: int | None = None  # of the next forward's draws

    def forward(self) -> None:
        """Seed the generators."""
        seed, self.seed = self.seed, None
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():
                generators = torch.cuda.default_generators
                generators[torch.cuda.current_device()].manual_seed(seed)


class Randomness:
    """What the layers of a stage draw from.

    Args:
        module: the stage's; its graph has a `LayerStart` for each layer.
        seed: of the job.
    """

    def __init__(self, module: nn.Module, seed: int) -> None:
        starts = [m for m in module.modules() if isinstance(m, LayerStart)]
        self._starts = [(start, _hash(f"{seed}/{start.layer}")) for start in starts]
        self._gates = list(_seeded(module.modules()))

    def begin(self, step: int, micro_batch: int) -> None:
        """The next forward is this one's."""
        number = _mixed(step << 20 ^ micro_batch)
        for start, own in self._starts:
            start.seed = _mixed(own ^ number)
        for gate in self._gates:  # those with a seed of their own count their draws
            gate.draws = number


def _seeded(modules: Iterable[nn.Module]) -> Iterable[Gate]:
    return (m for m in modules if isinstance(m, Gate) and m.seed is not None)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(value: int) -> int:
    """SplitMix64's finisher: neighbouring numbers give unrelated ones."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
