"""Which layer may run on which type: what is pinned, excluded, or stays with its neighbour."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from chassis.near import near_or_all
from scheduler.problem.fields import InputError

Allowed = NDArray[np.bool_]  # [L, T]


def forbid(allowed: Allowed, excluded: Sequence[str], types: Sequence[str]) -> None:
    """Allow no layer a type that is excluded; an `InputError` if it is none on offer."""
    for name in excluded:
        if name not in types:
            problem = f"{name!r}: expected a type on offer{near_or_all(str(name), types)}"
            raise InputError("", "exclude", problem)
        allowed[:, types.index(name)] = False


def put(
    allowed: Allowed,
    pin: Mapping[str, str] | Sequence[str] | None,
    layers: Sequence[str],
    types: Sequence[str],
) -> None:
    """Allow pinned layers nothing but their type, given by their names or one a layer.

    Raises:
        InputError: a layer that there is not, or a type that may not run it.
    """
    if pin is None:
        return
    if not isinstance(pin, Mapping):
        if isinstance(pin, str) or len(pin) != len(layers):
            problem = f"{pin!r}: expected one type for each of the {len(layers)} layers"
            raise InputError("", "pin", problem)
        pin = dict(zip(layers, pin, strict=True))
    for name, kind in pin.items():
        if name not in layers:
            raise InputError("", "pin", f"{name!r}: expected a layer{near_or_all(name, layers)}")
        row = layers.index(name)
        able = [types[int(t)] for t in np.flatnonzero(allowed[row])]
        if kind not in able:
            problem = f"{kind!r}: expected a type that may run it{near_or_all(str(kind), able)}"
            raise InputError("", f"pin.{name}", problem)
        allowed[row] = np.arange(len(types)) == types.index(kind)


def join(allowed: Allowed, joined: NDArray[np.bool_]) -> None:
    """Allow layers that stay with the one before, [L], the types that all of them may run on."""
    for row in np.flatnonzero(joined):
        allowed[row] &= allowed[row - 1]
    for row in np.flatnonzero(joined)[::-1]:
        allowed[row - 1] &= allowed[row]
