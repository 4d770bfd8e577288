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
# By folder, what its code has imported from there.
_loaded: dict[Path, dict[str, ModuleType]] = {}
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
    try:
        with modules_of(path.parent):
            sys.modules[name] = _imported(path) or _executed(importlib.util.module_from_spec(spec))
    except Exception as error:
        raise EntryError(f"{key}: {path}: {type(error).__name__}: {error}") from error
    return sys.modules[name]


def _imported(path: Path) -> ModuleType | None:
    """The module of a file, where code beside it has imported it."""
    module = sys.modules.get(path.stem)
    return module if module is not None and _place(module) == path else None


def _executed(module: ModuleType) -> ModuleType:
    """A module, its code run; code beside its file that imports it by its name has the same one."""
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    stem = _place(module).stem
    names = [module.__name__]
    if stem.isidentifier() and stem not in sys.modules and stem not in sys.stdlib_module_names:
        names.append(stem)
    sys.modules.update(dict.fromkeys(names, module))
    try:
        module.__spec__.loader.exec_module(module)
    except BaseException:
        for name in names:
            sys.modules.pop(name, None)
        raise
    return module


@contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """Have imports find a folder's modules first, whatever else has their names in this process.

    What the process itself has imported is back afterwards. Of folders the last one's stay, but for
    those of which another folder has another module of that name: code that imports one only when
    it is called finds none, and not that of others.
    """
    with _importing:
        others = {
            name: module
            for name, module in list(sys.modules.items())
            if _has(folder, name.partition(".")[0]) and _is_elsewhere(module, folder)
        }
        before = sys.modules.keys() - others.keys()
        for name in others:
            del sys.modules[name]
        sys.modules.update(_loaded.get(folder, {}))
        sys.path.insert(0, str(folder))
        back = others
        try:
            yield
            theirs = {id(module) for some in _loaded.values() for module in some.values()}
            back = {name: module for name, module in others.items() if id(module) not in theirs}
        finally:
            sys.path.remove(str(folder))
            added = {name: sys.modules[name] for name in sys.modules.keys() - before}
            own = {name: one for name, one in added.items() if _place(one).is_relative_to(folder)}
            _loaded.setdefault(folder, {}).update(own)
            taken = {name.partition(".")[0] for name in back}
            taken |= {name for name in {n.partition(".")[0] for n in own} if _differs(folder, name)}
            for name in own:
                if name.partition(".")[0] in taken:
                    del sys.modules[name]
            sys.modules.update(back)


@contextmanager
def importing_anew(folder: Path) -> Iterator[None]:
    """Have a user's modules of a folder be imported as in a new process; afterwards all is back."""
    folder = folder.resolve()
    with _importing:
        before, loaded = _users(folder), dict(_loaded)
        for name in before:
            del sys.modules[name]
        _loaded.clear()
        try:
            yield
        finally:
            for name in _users(folder):
                del sys.modules[name]
            sys.modules.update(before)
            _loaded.clear()
            _loaded.update(loaded)


def _users(folder: Path) -> dict[str, ModuleType]:
    """The modules of a folder that are neither a library's nor ours."""
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name != "__main__"
        and name.partition(".")[0] not in ROOMS
        and _place(module).is_relative_to(folder)
        and not _is_library(module)
    }


def imported() -> list[ModuleType]:
    """All modules of this process, and those of user's code whose names others have by now."""
    return [*sys.modules.values(), *(one for some in _loaded.values() for one in some.values())]


def _has(folder: Path, name: str) -> bool:
    """Whether a folder has a module of that name, of which `clash` has not told."""
    if name == "__main__" or name in ROOMS:
        return False
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def _differs(folder: Path, name: str) -> bool:
    """Whether another folder that code was loaded from has another module of that name."""
    own = _texts(folder, name)
    return any(_has(one, name) and _texts(one, name) != own for one in _loaded if one != folder)


def _texts(folder: Path, name: str) -> dict[Path, bytes]:
    """What a module's files say, by their places in its folder."""
    files = [folder / f"{name}.py", *(folder / name).rglob("*.py")]
    return {file.relative_to(folder): file.read_bytes() for file in files if file.is_file()}


def _is_elsewhere(module: ModuleType, folder: Path) -> bool:
    """Whether a module is a user's of another folder, and of no library."""
    place = _place(module)
    return place.is_absolute() and not _is_library(module) and not place.is_relative_to(folder)


def _is_library(module: ModuleType) -> bool:
    place = _place(module)
    return str(place).startswith(_LIBRARIES) or "site-packages" in place.parts


def _place(module: ModuleType) -> Path:
    """Its file, or its folder where it is a package without a file; else a relative path."""
    file = getattr(module, "__file__", None)
    return Path(file or next(iter(getattr(module, "__path__", [])), ""))
