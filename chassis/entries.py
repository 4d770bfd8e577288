"""Callables of a user's own code, named `file.py:name`."""

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from chassis.rooms import IN_A_WORKER, clash, loaded

_importing = threading.RLock()


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
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise EntryError(f"{key}: {path}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module
