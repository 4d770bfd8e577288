"""Buffers that forwards change besides running statistics: averages, counts, power iterations."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from workers.moe.gates import Bias


def other_buffers(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Module and name of the buffers that are no running statistics and no gate's, by path."""
    return {
        f"{path}.{name}".lstrip("."): (child, name)
        for path, child in module.named_modules()
        if not counts(child) and not isinstance(child, Bias)
        for name, _ in child.named_buffers(recurse=False)
    }


def counts(module: nn.Module) -> bool:
    """Whether a module keeps running statistics."""
    return isinstance(module, _NormBase) and module.running_mean is not None


class ChangingBuffers:
    """Has each forward change buffers of its own, as backwards under way have read what they were.

    In one process of plain PyTorch a backward comes before the next forward.
    """

    def __init__(self, module: nn.Module) -> None:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for child, name in other_buffers(module).values():
            places.setdefault(id(getattr(child, name)), []).append((child, name))
        # What a module has by an attribute, too, is to stay the same tensor.
        besides = {id(value) for child in module.modules() for value in vars(child).values()}
        self._places = [some for one, some in places.items() if one not in besides]
        self._changing: set[int] = set()

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Around a forward."""
        for number in self._changing:
            if (value := self._value(number)) is not None:
                renewed = value.clone()
                for child, name in self._places[number]:
                    child._buffers[name] = renewed
        before = [self._value(number) for number in range(len(self._places))]
        versions = [value._version if value is not None else 0 for value in before]
        yield
        for number, version in enumerate(versions):
            value = self._value(number)
            if value is not None and value is before[number] and value._version != version:
                self._changing.add(number)

    def _value(self, number: int) -> Tensor | None:
        child, name = self._places[number][0]
        value: Tensor | None = getattr(child, name)  # a forward may leave none
        return value
