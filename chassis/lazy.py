"""A room's face: its public names, each imported when it is first used.

    __getattr__, __dir__, __all__ = attach(__name__, {"ps.errors": ("ShardError", "TableError")})

So `import ps` costs neither NumPy nor gRPC. Types are in an `__init__.pyi` beside the face.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from chassis.rooms import ROOMS, need

# What a room imports, itself included.
_NEEDS: Final = {
    "heterps": ROOMS,
    "scheduler": ("scheduler", "chassis", "protos"),
    "workers": ("workers", "ps", "chassis", "protos"),
    "ps": ("ps", "chassis", "protos"),
}


def attach(
    room: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What a package needs to offer names whose modules are imported late (PEP 562).

    Args:
        room: the package's `__name__`.
        homes: module -> the names that it holds.

    Returns:
        Its `__getattr__`, `__dir__` and `__all__`.

    Raises:
        ClashError: a module of the user's stands in the way, now or when a name is first used.
    """
    # A job may have a `scheduler` of its own, as long as no name of ours is used that needs ours.
    need([one for one in _NEEDS[room] if one != "scheduler" or room == one])
    home = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        need(_NEEDS[home[name].partition(".")[0]])
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[room], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[room]), *home})

    return get, names, sorted(home)
