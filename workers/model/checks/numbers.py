"""Numbers that code keeps from one call to the next: what counts its calls has changed one.

They are attributes of objects and of their classes, what these hold in dicts and lists, and
globals and variables of enclosing functions that code reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_TORCHS = frozenset(vars(nn.Module()))  # attributes that are not a model's own
_OTHERS = ("torch", "builtins", "numpy")  # whose classes keep none of a job
_DEPTH = 2  # of what holds numbers, below an object
_MANY = 1000  # as a vocabulary has: those of such a dict or list are not looked at
_FAR = 1_000_000  # calls


@dataclass(frozen=True, slots=True)
class Number:
    """One, and where it is kept.

    Attributes:
        name: it has there.
        value: it had when it was looked at.
        held: what is there: a number, or a tensor with one.
    """

    name: str
    value: float
    held: Any = field(compare=False, repr=False)
    _put: Callable[[Any], None] = field(compare=False, repr=False)

    def put(self, other: Any) -> None:
        """Have another there, as far as that can be."""
        with suppress(Exception):  # such as of a frozen dataclass
            self._put(other)


class Numbers:
    """Those that modules, or a function, keep.

    Args:
        roots: modules with all that is below them, functions, objects that are called, or classes.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._seen: set[int] = set()
        self.found: dict[tuple[int, str], Number] = {}  # by the memory of the holder, and the name
        for root in roots:
            if isinstance(root, type):
                self._of_class(root)
            for one in root.modules() if isinstance(root, nn.Module) else [root]:
                self._look_at(one)

    def changed(self) -> list[Number]:
        """Those that have another value now, as they are now."""
        now = Numbers(*self._roots).found
        return [
            number
            for place, number in now.items()
            if place in self.found and not _same(self.found[place].value, number.value)
        ]

    def _look_at(self, one: Any, depth: int = _DEPTH) -> None:
        if id(one) in self._seen or isinstance(one, type | ModuleType):
            return
        self._seen.add(id(one))
        if isinstance(one, MethodType):
            self._look_at(one.__self__)
            one = one.__func__
        if isinstance(one, FunctionType):
            self._read_by(one)
        elif isinstance(one, dict | list) and len(one) > _MANY:
            return
        elif isinstance(one, dict):
            self._in(one, one.items(), one.__setitem__, depth)
        elif isinstance(one, list):
            self._in(one, enumerate(one), one.__setitem__, depth)
        elif hasattr(one, "__dict__") and not isinstance(one, Tensor):
            own = [(k, v) for k, v in vars(one).items() if k not in _TORCHS]
            self._in(one, own, partial(setattr, one), depth)
            self._of_class(type(one))

    def _of_class(self, whole: type) -> None:
        for made in whole.__mro__:
            if made.__module__.partition(".")[0] not in _OTHERS and id(made) not in self._seen:
                self._seen.add(id(made))
                self._in_class(made)

    def _in_class(self, made: type) -> None:
        own = [*vars(made).items()]
        self._in(made, own, partial(setattr, made), 1)
        for _, one in own:
            if isinstance(one, FunctionType):
                self._look_at(one)

    def _read_by(self, function: FunctionType) -> None:
        """What a function reads of what is not its own."""
        names = {*_names(function.__code__)}
        for holder in (function.__globals__, *_modules(function.__globals__, names)):
            own = [(name, holder[name]) for name in sorted(names & holder.keys())]
            self._in(holder, own, holder.__setitem__, _DEPTH)
            for _, one in own:
                if isinstance(one, FunctionType) and one.__globals__ is holder:
                    self._look_at(one)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # of one that is not there yet
                held = [("cell_contents", cell.cell_contents)]
                self._in(cell, held, partial(setattr, cell), _DEPTH)

    def _in(self, holder: Any, items: Any, put: Callable[[Any, Any], None], depth: int) -> None:
        for name, value in items:
            if _is_number(value):
                place, put_here = (id(holder), str(name)), partial(put, name)
                one = float(value) if isinstance(value, Tensor) else value
                self.found[place] = Number(str(name), one, value, put_here)
            elif depth and not isinstance(value, nn.Module):
                self._look_at(value, depth - 1)


def _same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)  # noqa: PLR0124 (NaN is NaN)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        plain = value.layout == torch.strided and value.device.type == "cpu"
        return plain and value.numel() == 1 and not (value.is_complex() or value.requires_grad)
    return type(value) in (int, float) or isinstance(value, np.integer | np.floating)


def far(numbers: Sequence[Number], call: Callable[[], Any]) -> Any:
    """What a call gives where what has counted calls has counted many; they are set back.

    Raises:
        Exception: what it raises then, such as for an index.
    """
    try:
        for one in numbers:
            one.put(one.held + _FAR)
        return call()
    finally:
        for one in numbers:
            one.put(one.held)


def _names(code: CodeType) -> Iterator[str]:
    """Names that code reads, with that of functions inside it."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names(one)


def _modules(names: Mapping[str, Any], read: set[str]) -> Iterator[dict[str, Any]]:
    """What modules have that are read."""
    for name in sorted(read & names.keys()):
        if isinstance(one := names[name], ModuleType):
            yield vars(one)
