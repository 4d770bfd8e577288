"""Versions of a stage's dense parameters: S+1 for a staleness of S (PipeDream-2BW, generalised).

Step t computes on W^max(0, t-S), the weights after that many updates, while the steps before it are
still under way. Version `t mod (S+1)` holds what step t computes on and collects its gradient. Once
step t is over it takes the newest weights and the optimizer's step, and is then what step t+S+1
computes on. With S = 0 there is the module's own version and nothing is copied.

A version is put into the module before each forward and backward: a backward may run the forward
again to save memory. Autograd keeps the tensors that it was given, whichever are in place since.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from workers.model.module.places import Place, parameter_places
from workers.moe.gates import Bias


class Versions:
    """The tensors that training changes, in as many versions as steps may be open at once.

    Args:
        module: whose parameters are the first version.
        staleness: updates that a step lacks.

    Raises:
        ModelError: a parameter is also kept where no other version can be put.
    """

    def __init__(self, module: nn.Module, staleness: int) -> None:
        self._count = staleness + 1
        self._places = parameter_places(module, besides=staleness > 0)
        self._first_buffer = len(self._places)
        for child in module.modules():
            if isinstance(child, Bias):  # its bias moves once a step, as a parameter does
                self._places.setdefault(child.bias, []).append(Place(child, "bias"))
        names: dict[int, list[str]] = {}
        for name, tensor in chain(
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        ):
            names.setdefault(id(tensor), []).append(name)
        # Of each tensor all that it goes by; the parameters' come first.
        self.names = [tuple(names[id(tensor)]) for tensor in self._places]
        self._tensors: list[list[Tensor]] = [list(self._places)]
        self._where = list(self._places.values())
        self._in_place = 0

    def open(self) -> None:
        """Make the further versions of the first, which must not change before its first step."""
        first = self._tensors[0]
        self._tensors += [[_copy(t) for t in first] for _ in range(self._count - 1)]

    def earlier(self, step: int) -> list[dict[str, Tensor]]:
        """After the update of `step - 1`: all as it was one update before, two, ... S."""
        return [
            {
                names[0]: tensor
                for names, tensor in zip(
                    self.names, self._tensors[(step - 1 - age) % self._count], strict=True
                )
            }
            for age in range(1, self._count)
        ]

    @torch.no_grad()
    def resume(self, step: int, earlier: Sequence[Mapping[str, Tensor]]) -> None:
        """Begin at a step, with what `earlier` gave then; all versions are the newest so far.

        The module has the newest, also where no step is left to take.

        Of another staleness: the newest of them are taken, or the oldest again.
        """
        for age in range(1, self._count if earlier else 1):
            values = earlier[min(age, len(earlier)) - 1]
            version = self._tensors[(step - 1 - age) % self._count]
            for names, tensor in zip(self.names, version, strict=True):
                tensor.copy_(next(values[name] for name in names if name in values))
        self.use_newest(step)

    def parameters(self, step: int) -> list[nn.Parameter]:
        """What a step computes on and collects its gradient in."""
        return self._tensors[step % self._count][: self._first_buffer]  # type: ignore[return-value]

    def newest(self, steps: int) -> list[nn.Parameter]:
        """Those of the newest version, after so many steps."""
        return self.parameters(max(0, steps - 1))

    def use_newest(self, steps: int) -> None:
        """Put the newest version, after so many steps, into the module."""
        self.use(max(0, steps - 1))

    def use(self, step: int) -> None:
        """Put the version of a step into the module."""
        number = step % self._count
        if number == self._in_place:
            return
        self._in_place = number
        for tensor, places in zip(self._tensors[number], self._where, strict=True):
            for place in places:
                place.put(tensor)

    @torch.no_grad()
    def advance(self, step: int) -> None:
        """Give the version of a step, which is over, the weights after the steps before it.

        The module has it then, and the optimizer is to change it in place.
        """
        if step > 0 and self._count > 1 and self._where:
            newest = self._tensors[(step - 1) % self._count]
            torch._foreach_copy_(self._tensors[step % self._count], newest)
        self.use(step)


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied)
        copied.__dict__.update(tensor.__dict__)  # tags
    return copied
