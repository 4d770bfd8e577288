"""Tests that can fail: each fault of `faults/`, planted in a copy of the tree, fails its test.

A fault is a patch without context whose heading says what it breaks and, in a line
`Test: path::name`, which quick test tells. One that no longer applies is to be planted anew, where
the code has gone.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = sorted((Path(__file__).parent / "faults").glob("*.patch"))
COPIED = (
    *("chassis", "cuda", "heterps", "protos", "ps", "scheduler", "workers"),
    *("bench", "deploy", "examples", "tests"),
)
NATIVE = ("ps.engine._native", "scheduler.engine._planner", "workers.ops._ops")
# Where the project is installed in place, a finder of its own knows its packages before the path.
SITE = """
import sys

sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
"""
# A patch that breaks the program everywhere would prove nothing of its test.
BROKEN = re.compile(
    r"^E +(\w*\.)*(Syntax|Name|Import|ModuleNotFound|Attribute|Indentation)Error", re.M
)


def named_in(fault: Path) -> str:
    """The test that a fault names."""
    found = re.findall(r"^Test: (\S+)$", fault.read_text().partition("\n---")[0], re.M)
    assert len(found) == 1, f"{fault.name}: expected one line 'Test: path::name'"
    return str(found[0])


def copied(to: Path) -> Path:
    """A copy of the tree, with what was built for it."""
    for room in COPIED:
        shutil.copytree(ROOT / room, to / room, ignore=shutil.ignore_patterns("results"))
    shutil.copy(ROOT / "pyproject.toml", to)
    for name in NATIVE:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        target = to / Path(*name.split(".")[:-1]) / Path(spec.origin).name
        if not target.exists():
            shutil.copy(spec.origin, target)
    (to / "sitecustomize.py").write_text(SITE)
    return to


def plant(fault: Path, tree: Path) -> None:
    """Put the new lines of each hunk in the place of its old ones, which are there once."""
    name = ""
    for part in re.split(r"^(?=@@|--- a/)", fault.read_text(), flags=re.M)[1:]:
        if part.startswith("---"):
            name = part.splitlines()[0].removeprefix("--- a/")
            continue
        lines = part.splitlines(keepends=True)[1:]
        old = "".join(line[1:] for line in lines if line.startswith("-"))
        new = "".join(line[1:] for line in lines if line.startswith("+"))
        path = tree / name
        text = path.read_text() if path.is_file() else ""
        assert old, f"{fault.name}: expected old lines in every hunk"
        assert text.count(old) == 1, (
            f"{fault.name} no longer applies: expected once in {name}, plant it anew:\n{old}"
        )
        path.write_text(text.replace(old, new))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()


def run(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy on the code of the copy."""
    # Compiled code is told by whole seconds from that of a file that has just changed.
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
    return subprocess.run(
        [*command, *tests], cwd=tree, env=env, capture_output=True, text=True, timeout=1200,
        check=False,
    )  # fmt: skip


@pytest.mark.exhaustive
def test_without_a_fault_they_all_pass(tmp_path: Path) -> None:
    ran = run(copied(tmp_path / "tree"), *sorted({named_in(fault) for fault in FAULTS}))
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "skipped" not in ran.stdout.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.stem for fault in FAULTS])
def test_a_fault_fails_its_test(fault: Path, tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree")
    plant(fault, tree)
    ran = run(tree, named_in(fault))
    told = ran.stdout[-4000:] + ran.stderr[-2000:]
    assert ran.returncode == 1, f"{fault.name}: expected a failure\n{told}"
    assert not BROKEN.search(ran.stdout), f"{fault.name}: breaks more than it should\n{told}"


def test_every_fault_applies(tmp_path: Path) -> None:
    """Quick, so that whoever changes the code that one is planted in hears of it at once."""
    for fault in FAULTS:
        tree = tmp_path / fault.stem
        for name in re.findall(r"^--- a/(\S+)", fault.read_text(), re.M):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copy(ROOT / name, tree / name)
        plant(fault, tree)
        path, _, name = named_in(fault).partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), fault.name
