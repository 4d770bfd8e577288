"""The kernels built for a CPU by g++ alone: a program that tests them, or the module of the ops.

What was built is kept for a week below `build/emulate/`, named by all that went into it.
"""

import fcntl
import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.cuda.emulate.translate import translate_tree

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KEPT = ROOT / "build" / "emulate"
COMPILER = ("g++",)
# Registers begin as poison, and sums are those of the twins.
FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-g1",
    "-fno-working-directory",
    "-ffp-contract=off",
    "-ftrivial-auto-var-init=pattern",
)
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-attributes", "-Wno-sign-compare")
ADDRESSES = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADS = ("-fsanitize=thread",)


def sources() -> dict[str, str]:
    """The text of what is below `cuda/`, by its path there.

    What is in PTX has a stand-in, and so has what is CUTLASS's (`products.cpp`).
    """
    room = ROOT / "cuda"
    files = sorted(p for p in room.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".cpp"))
    files = [p for p in files if p.parent.name != "sm90"]
    text = {str(p.relative_to(room)): p.read_text() for p in files}
    return text | {"include/heterps/ptx.cuh": (HERE / "include" / "ptx.h").read_text()}


@dataclass(frozen=True)
class _Unit:
    """A file to be compiled, and the flags beside those of all."""

    source: Path
    flags: tuple[str, ...] = ()


def driver(sanitizer: Sequence[str] = (), changed: Mapping[str, str] | None = None) -> Path:
    """The program that runs kernels beside their CPU twins: `driver OP ROUNDS SEED`.

    Args:
        sanitizer: ADDRESSES, THREADS or none.
        changed: text of files below `cuda/`, by their path there, instead of theirs.

    Raises:
        RuntimeError: it does not compile.
    """
    units = [_Unit(path) for path in sorted((HERE / "driver").glob("*.cc"))]
    return _built("driver", units, sanitizer, changed or {})


def module() -> Path:
    """The module `_ops` whose arrays on a CPU go to the kernels."""
    import nanobind

    binder = Path(nanobind.source_dir())
    headers = [nanobind.include_dir(), sysconfig.get_paths()["include"]]
    headers.append(str(binder.parent / "ext" / "robin_map" / "include"))
    flags = (
        *(f"-isystem{path}" for path in headers),
        *("-O0", "-fvisibility=hidden", "-DHETERPS_WITH_CUDA", "-DHETERPS_CUDA_CAPABILITY=80"),
        "-DHETERPS_CUDA_DEVICE=nb::device::cpu::value",
    )
    bindings = sorted(path for path in sources() if path.startswith("bindings/"))
    units = [_Unit(Path(path), flags) for path in bindings if path.endswith(".cpp")]
    units.append(_Unit(binder / "nb_combined.cpp", (*flags, "-w")))
    return _built("_ops.so", units, (), {}, "-shared")


def _built(
    name: str,
    units: Sequence[_Unit],
    sanitizer: Sequence[str],
    changed: Mapping[str, str],
    *linking: str,
) -> Path:
    """Kernels, twins and the emulation, and beside them `units`, which may lie below `cuda/`."""
    text = sources()
    assert changed.keys() <= text.keys()
    text.update(changed)
    every = [_Unit(Path(path)) for path in text if re.fullmatch(r"src/\w+\.(cu|cpp)", path)]
    blocks = ("-DHETERPS_INSTRUCTIONS=portable", "-DHETERPS_TILING=16,4")
    every = [_Unit(u.source, (*sanitizer, "-O1", *blocks)) for u in every]
    every += [_Unit(u.source, (*sanitizer, "-O1", *u.flags)) for u in units]
    # The thread sanitizer is told of fibers by these two and must not watch them itself.
    own = ("-O2", "-DEMULATE_THREAD_SANITIZER") if sanitizer == THREADS else ("-O2", *sanitizer)
    every += [_Unit(HERE / source, own) for source in ("block.cpp", "fiber.cpp")]
    every.append(_Unit(HERE / "products.cpp", (*sanitizer, "-O2")))
    KEPT.mkdir(parents=True, exist_ok=True)
    with (
        (KEPT / "lock").open("w") as lock,  # other processes of the tests want the same
        tempfile.TemporaryDirectory() as tree,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        _forget()
        translate_tree(text, Path(tree))
        objects = list(pool.map(lambda unit: _compiled(unit, Path(tree)), every))
        command = [*COMPILER, *sanitizer, *linking, *(str(path) for path in objects)]
        return _kept(repr(command), name, lambda to: _run([*command, "-o", str(to)], Path(tree)))


def _compiled(unit: _Unit, tree: Path) -> Path:
    """The object of what the preprocessor gives: equal text is compiled once."""
    language = ["-x", "c++"] if unit.source.suffix == ".cu" else []
    flags = [*FLAGS, *WARNINGS, *unit.flags]
    paths = ["-Iinclude", f"-I{HERE / 'include'}"]
    text = _run([*COMPILER, *flags, *paths, "-E", *language, str(unit.source)], tree)
    command = [*COMPILER, *flags, "-c", "-x", "c++-cpp-output", "-"]
    return _kept(repr(command) + text, "o", lambda to: _run([*command, "-o", str(to)], tree, text))


def _kept(key: str, name: str, make: Callable[[Path], object]) -> Path:
    path = KEPT / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.{name}"
    if path.exists():
        path.touch()
    else:
        partial = path.with_suffix(".partial")
        make(partial)
        partial.rename(path)
    return path


def _forget() -> None:
    """Remove what nobody has asked for in a week."""
    for path in KEPT.iterdir():
        if path.stat().st_mtime < time.time() - 7 * 86400:
            path.unlink()


def _run(command: Sequence[str], within: Path, text: str | None = None) -> str:
    done = subprocess.run(
        command, cwd=within, input=text, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-6000:]}")
    return done.stdout
