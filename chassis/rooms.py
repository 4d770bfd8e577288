"""Our top-level packages beside a user's modules of the same names: which of two is meant.

Where a process needs no package of ours, a user's module of that name is the one that is imported;
where it needs ours, `clash` tells beforehand of code that would import its own, with both paths.
"""

import ast
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

ROOMS: Final = ("heterps", "scheduler", "workers", "ps", "chassis", "protos")
IN_A_WORKER: Final = ("heterps", "workers", "ps", "chassis", "protos")  # a worker never plans
ROOT: Final = Path(__file__).resolve().parents[1]
_OURS: Final = tuple(f"{ROOT / room}/" for room in ROOMS)
_EARLY: Final = set[str]()
_MOST_FILES = 2000  # of a user's, read for their imports


class ClashError(ImportError):
    """A process needs both our package and a user's module of one name."""


def clash(entry: Path, folders: Sequence[Path], needed: Collection[str]) -> str:
    """What to say of code that imports a module of its own under a name that is needed; else "".

    Follows imports from file to file, as far as they are written as such and lie in `folders`.

    Args:
        entry: the file to begin with.
        folders: where its modules are looked for, first to last.
        needed: of `ROOMS`, those that the process needs.
    """
    taken = {room for room in needed for folder in folders if _is_taken(folder, room)}
    if not taken:
        return ""
    for file, module, name, line, theirs in _followed(entry, folders):
        room = module.partition(".")[0]
        if room in taken and _means(theirs, module, name):
            return (
                f"{file}:{line}: imports {module!r} of its own, at {theirs[-1]}, where HeterPS "
                f"needs its own {room!r}, at {ROOT / room}; rename yours, or move it into a "
                "package of another name"
            )
    return ""


def imported(entry: Path, folders: Sequence[Path]) -> set[Path]:
    """The files that code imports, and they in their turn, as far as `clash` follows them."""
    found = (theirs for *_, theirs in _followed(entry, folders))
    return {path for theirs in found for path in theirs if path.is_file()} - {entry}


def loaded() -> set[str]:
    """Of `ROOMS`, those that this process has imported from us."""
    return {room for room in ROOMS if _is_ours(sys.modules.get(room))}


def need(rooms: Collection[str]) -> None:
    """Make sure that `rooms` are ours from here on, in this process.

    Raises:
        ClashError: a module of the user's has the name already, or the script that runs would
            import one.
    """
    for room in rooms:
        module = sys.modules.get(room)
        if module is not None and not _is_ours(module):
            raise ClashError(
                f"{getattr(module, '__file__', None) or room}: imported as {room!r}, where HeterPS "
                f"needs its own, at {ROOT / room}; rename yours, or move it into a package of "
                "another name",
                name=room,
            )
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if script is not None and not in_ours(script):
        file = Path(script).resolve()
        folders = [Path(sys.path[0] or ".").resolve()]
        if getattr(main, "__spec__", None) is None:  # not run by -m: its folder is searched, too
            folders.append(file.parent)
        if said := clash(file, folders, rooms):
            raise ClashError(said)


def give_way(folders: Sequence[Path], needed: Collection[str] = IN_A_WORKER) -> None:
    """Run a user's code in this process: modules in `folders` win but for names `needed` here."""
    _FINDER.folders = [str(folder) for folder in folders]
    _FINDER.needed = frozenset(needed)
    for name in [name for name in sys.modules if name.partition(".")[0] in _EARLY]:
        if _found(name.partition(".")[0], folders):
            del sys.modules[name]


def imported_early(names: Collection[str]) -> None:
    """These top-level modules are here only to save time: a user's of the same names still win.

    Whoever has imported them keeps what it has.
    """
    _EARLY.update(names)


def python_path(given: str | None) -> str | None:
    """PYTHONPATH for a process of ours: as given, unless that would hide a package of ours."""
    folders = [Path(part or ".").resolve() for part in given.split(os.pathsep)] if given else []
    hides = any(f != ROOT and _found(room, [f]) for f in folders for room in ROOMS)
    return f"{ROOT}{os.pathsep}{given}" if hides else given


class _Finder(MetaPathFinder):
    """Gives our code our packages, and others' code theirs where nothing here needs ours."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.needed: frozenset[str] = frozenset(IN_A_WORKER)

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in ROOMS:
            return None
        if not _asked_by_us() and fullname not in self.needed:
            theirs = PathFinder.find_spec(fullname, self.folders) if self.folders else None
            theirs = theirs or PathFinder.find_spec(fullname, sys.path)
            if theirs is not None and _holds_python(theirs):
                return theirs
        return PathFinder.find_spec(fullname, [str(ROOT)])


_FINDER = _Finder()
sys.meta_path.insert(0, _FINDER)  # before those of editable installs, which know our names too


def _is_ours(module: ModuleType | None) -> bool:
    return module is not None and in_ours(getattr(module, "__file__", None) or "")


@cache
def in_ours(file: str) -> bool:
    """Whether a file is of our packages, whatever links lead there."""
    return os.path.realpath(file).startswith(_OURS)


def _asked_by_us() -> bool:
    """Whether the import that is under way stands in a file of ours."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return in_ours(frame.f_code.co_filename)


def _holds_python(spec: ModuleSpec) -> bool:
    """Whether it is more than a folder that happens to have the name."""
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    return spec.has_location or any(next(place.glob("*.py"), None) for place in places)


def _is_taken(folder: Path, room: str) -> bool:
    """Whether a folder has something else than our package, or a copy of it, under its name."""
    theirs, ours = folder / room / "__init__.py", ROOT / room / "__init__.py"
    if theirs.is_file():
        return theirs.read_bytes() != ours.read_bytes()
    return (folder / room).is_dir() or (folder / f"{room}.py").is_file()


def _followed(
    entry: Path, folders: Sequence[Path]
) -> Iterator[tuple[Path, str, str, int, list[Path]]]:
    """Each import of a file, and of the files it imports: as of `_imports`, and where it leads."""
    files, seen = [entry], {entry}
    while files and len(seen) < _MOST_FILES:
        file = files.pop()
        for module, name, line in _imports(file, folders):
            theirs = _found(module, folders)
            if name:
                theirs = _found(f"{module}.{name}", folders) or theirs
            if theirs and in_ours(str(theirs[-1])):
                continue
            yield file, module, name, line, theirs
            fresh = [path for path in theirs if path.is_file() and path not in seen]
            seen.update(fresh)
            files += fresh


def _imports(file: Path, folders: Sequence[Path]) -> Iterator[tuple[str, str, int]]:
    """What a file imports: the module, dotted and absolute, the name from it if any, the line."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # whoever runs it says so
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", node.lineno
        elif isinstance(node, ast.ImportFrom):
            parts = [node.module] if node.module else []
            if node.level:
                above = file.parents[node.level - 1]
                inside = next((f for f in folders if above.is_relative_to(f) and above != f), None)
                if inside is None:
                    continue
                parts = [*above.relative_to(inside).parts, *parts]
            for alias in node.names:
                yield ".".join(parts), alias.name, node.lineno


def _means(theirs: Sequence[Path], module: str, name: str) -> bool:
    """Whether an import of a name of `ROOMS` is of what the user's files have there."""
    if len(theirs) > module.count(".") + 1:
        return True  # a module within theirs
    if "." in module or not theirs or not theirs[0].is_file():
        return "." in module and bool(theirs)
    ours = import_module(module)
    if not _is_ours(ours) or name not in getattr(ours, "__all__", ()):
        return True
    tree = ast.parse(theirs[0].read_bytes())
    return any(getattr(node, "name", getattr(node, "id", "")) == name for node in ast.walk(tree))


def _found(name: str, folders: Sequence[Path]) -> list[Path]:
    """A module's file with those of the packages around it, or a folder without `__init__.py`."""
    parts = name.split(".")
    for folder in folders:
        found: list[Path] = []
        for depth in range(1, len(parts) + 1):
            place = folder.joinpath(*parts[:depth])
            files = (place / "__init__.py", place.with_suffix(".py"))
            file = next((one for one in files if one.is_file()), None)
            if file is None and not (place.is_dir() and next(place.glob("*.py"), None)):
                break
            found.append(file or place)
        else:
            return found
    return []
