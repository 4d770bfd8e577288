"""Callables of a user's own code, named `file.py:name`.

Such a file imports the modules that lie beside it, also in a process that has modules of the same
names from elsewhere, as one that loads two models has.
"""

import importlib.util
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from chassis.rooms import IN_A_WORKER, ROOMS, clash, loaded

_importing = threading.RLock()
# By folder, its modules whose names others have in this process.
_beside: dict[Path, dict[str, ModuleType]] = {}
_LIBRARIES = tuple({sysconfig.get_path(one) for one in ("stdlib", "platstdlib", "purelib")})


class EntryError(ValueError):
    """A callable that cannot be found or imported."""


def load_entry(entry: str, directory: Path, key: str) -> Callable[..., Any]:
    """The callable named by `file.py:name`, `file.py` being relative to `directory`.

    Raises:
        EntryError: names the key, the file or name that is missing.
    """
    file, _, name = entry.partition(":")
    path = (directory / file).resolve()
    if not name or not file.endswith(".py"):
        raise EntryError(f"{key}: {entry!r}: expected file.py:callable")
    if not path.is_file():
        raise EntryError(f"{key}: {path}: no such file")
    with _importing:  # who comes meanwhile would find half of a module
        module = _import_file(path, (path.parent, directory.resolve()), key)
    found = getattr(module, name, None)
    if not callable(found):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise EntryError(f"{key}: {path} has no callable {name!r}; it has {', '.join(names)}")
    return found  # type: ignore[no-any-return]


def _import_file(path: Path, folders: Sequence[Path], key: str) -> ModuleType:
    name = f"heterps_user_{path.stem}_{abs(hash(str(path)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EntryError(f"{key}: {path}: not a Python file")
    if said := clash(path, folders, {*IN_A_WORKER, *loaded()}):
        raise EntryError(f"{key}: {said}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        with _modules_of(path.parent):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise EntryError(f"{key}: {path}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


@contextmanager
def _modules_of(folder: Path) -> Iterator[None]:
    """Have imports find a folder's modules, where others of a user's have their names until then.

    Those are back afterwards: whoever imported them goes on with them.
    """
    names = {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/*.py")}
    names -= {*ROOMS}  # of which `clash` has told
    others = {n: m for n, m in _named(names).items() if _is_elsewhere(m, folder)}
    for name in others:
        del sys.modules[name]
    sys.modules.update(_beside.get(folder, {}))
    try:
        yield
    finally:
        if others:
            own = _named({name.partition(".")[0] for name in others})
            _beside.setdefault(folder, {}).update(own)
            for name in own:
                del sys.modules[name]
            sys.modules.update(others)


def _named(names: set[str]) -> dict[str, ModuleType]:
    """The modules of these names, and what is inside of them."""
    found = list(sys.modules.items())
    return {name: module for name, module in found if name.partition(".")[0] in names}


def _is_elsewhere(module: ModuleType, folder: Path) -> bool:
    """Whether a module is a user's of another folder, and of no library."""
    file = getattr(module, "__file__", None) or ""
    return bool(file) and not file.startswith(_LIBRARIES) and not Path(file).is_relative_to(folder)
