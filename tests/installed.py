"""The packages as a wheel installs them: in an environment of its own, without editable hooks."""

import shutil
import sys
import venv
from importlib import import_module
from pathlib import Path

from chassis.rooms import ROOMS, ROOT

_NATIVE = (
    "ps.engine._native",
    "scheduler.engine._planner",
    "workers.offload.engine._reads",
    "workers.ops._ops",
)


def install(folder: Path) -> tuple[Path, Path]:
    """Make the environment: its interpreter, and its folder of packages."""
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    site = next(folder.glob("lib/python*/site-packages"))
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__", "*.cc", "*.h")
        shutil.copytree(ROOT / room, site / room, ignore=ignored)
    for name in _NATIVE:
        file = Path(str(import_module(name).__file__))
        shutil.copy(file, site.joinpath(*name.split(".")[:-1]) / file.name)
    others = [path for path in sys.path if path.endswith("site-packages")]  # what we build on
    (site / "others.pth").write_text("\n".join(others) + "\n")
    return python, site
