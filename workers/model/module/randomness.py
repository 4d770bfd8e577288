"""Random numbers of a training: they follow from seed, step, micro-batch and layer alone.

So dropout, jitter and noise are the same wherever the model is cut and whichever worker computes
a micro-batch.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workers.model.code.entry import ModelError
from workers.moe.gate import Gate

_MASK = (1 << 64) - 1
_NO_STEP = -1
_SEEDED = "expected torch's, such as torch.rand(…), which are seeded for each forward"
_REMEDIES = {
    "torch": (
        "draws random numbers, and the number of micro-batches that they are drawn for is the "
        "plan's; expected one in the job file, such as train.micro_batches: 4"
    ),
    "numpy": f"draws random numbers from NumPy, which differ on each worker; {_SEEDED}",
    "random": f"draws from Python's random, which differs on each worker; {_SEEDED}",
}


@dataclass(frozen=True, slots=True)
class Draws:
    """How far the generators of the host are that a forward may draw from."""

    torch: Tensor
    numpy: Any
    python: Any

    @staticmethod
    def now() -> "Draws":
        """As they are."""
        return Draws(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate())

    def since(self) -> tuple[str, ...]:
        """Names of those that were drawn from since, as in `_REMEDIES`."""
        drawn = {
            "numpy": str(self.numpy) != str(np.random.get_state(legacy=False)),
            "random": self.python != random.getstate(),
            "torch": not torch.equal(self.torch, torch.get_rng_state()),
        }
        return tuple(name for name, has in drawn.items() if has)

    def again(self) -> None:
        """Have them as they were."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class LayerStart(nn.Module):
    """Stands in a stage's graph before the operations of a layer; seeds what they draw from.

    Without a seed, as outside of `Randomness.drawing`, it does nothing.

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
            _seed_generators(seed)


class Randomness:
    """What the layers of a stage draw from.

    Args:
        module: the stage's; its graph has a `LayerStart` for each layer.
        seed: of the job.
        fixed: whether the job fixes the number of micro-batches. Else nothing may be drawn: it
            would depend on the plan.
    """

    def __init__(self, module: nn.Module, seed: int, *, fixed: bool) -> None:
        starts = [m for m in module.modules() if isinstance(m, LayerStart)]
        self._starts = [(start, _hash(f"{seed}/{start.layer}")) for start in starts]
        self._gates = [m for m in module.modules() if isinstance(m, Gate) and m.seed is not None]
        self._fixed = fixed
        self._watched = False

    @contextmanager
    def drawing(self, step: int, micro_batch: int) -> Iterator[None]:
        """Around the forward of a micro-batch, by its number in the step.

        Raises:
            ModelError: the first forward drew from a generator that is not seeded by us, or drew
                at all where the job does not fix the number of micro-batches.
        """
        if self._fixed:
            self._seed(step, micro_batch)
        if self._watched:
            yield
            return
        self._watched = True
        before = _generators()
        yield
        after = _generators()
        drawn = [name for name in before if before[name] != after[name]]
        refuse_draws("the model", drawn, fixed=self._fixed)

    def measuring(self, batch: int) -> None:
        """Have the forward of a held-out batch that follows, by its number, draw from its own."""
        self._seed(_NO_STEP, batch)

    def _seed(self, step: int, micro_batch: int) -> None:
        number = _mixed(step << 20 ^ micro_batch)
        for start, own in self._starts:
            start.seed = _mixed(own ^ number)
        for gate in self._gates:  # those with a seed of their own count their draws
            gate.draws = number


def refuse_draws(who: str, drawn: Iterable[str], *, fixed: bool) -> None:
    """Refuse what draws from what differs on each worker.

    Args:
        who: does, for the error.
        drawn: the generators, by name.
        fixed: whether the job fixes the number of micro-batches that it is done for.

    Raises:
        ModelError: it does, and the remedy.
    """
    for name in drawn:
        if name != "torch" or not fixed:
            raise ModelError(f"{who} {_REMEDIES[name]}")


def seed_loss(seed: int, step: int) -> None:
    """Have a loss that several workers compute draw the same on each.

    Args:
        seed: of the job.
    """
    _seed_generators(_mixed(_hash(f"{seed}/") ^ _mixed(step)))


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def _generators() -> dict[str, object]:
    """The state of each generator that a forward may draw from."""
    devices = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else []
    return {
        "torch": (torch.get_rng_state().tolist(), devices),
        "numpy": str(np.random.get_state(legacy=False)),
        "random": random.getstate(),
    }


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(value: int) -> int:
    """SplitMix64's finisher: neighbouring numbers give unrelated ones."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
