"""A user's modules that have the names of our packages."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from chassis.rooms import IN_A_WORKER, ROOMS, ROOT, clash, loaded, python_path
from tests.installed import install

BESIDE = tuple(room for room in ROOMS if room != "heterps")  # one is what the script imports
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return install(tmp_path_factory.mktemp("venv"))


@pytest.fixture
def site(installed: tuple[Path, Path]) -> Path:
    return installed[1]


@pytest.fixture
def run(installed: tuple[Path, Path], tmp_path: Path) -> Run:
    """Runs a program as a script beside what the test has put there."""

    def ran(program: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "script.py").write_text(program)
        return subprocess.run(
            [installed[0], "script.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return ran


def put(folder: Path, rooms: tuple[str, ...], text: str) -> None:
    """Modules of a user's, some as packages."""
    for number, room in enumerate(rooms):
        place = folder / f"{room}.py" if number % 2 else folder / room / "__init__.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_files_of_our_names_beside_a_script_harm_nothing(
    run: Run, tmp_path: Path, site: Path
) -> None:
    put(tmp_path, BESIDE, "raise SystemExit('not this one')\n")
    (tmp_path / "heterps").mkdir()  # such as one for its results
    done = run(
        "import torch\nfrom heterps import Client, SparseEmbedding, plan\n"
        "print(SparseEmbedding('t', 2)(torch.ones(1, 1).long()).shape, Client, plan)\n"
        "import sys\n"
        "print([sys.modules[n].__file__ for n in ('ps', 'workers', 'scheduler', 'chassis')])\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.Size([1, 1, 2])")
    assert done.stdout.count(str(site)) == 4


@pytest.mark.parametrize("room", BESIDE)
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_script_that_needs_both_is_told_of_both(
    run: Run, tmp_path: Path, site: Path, room: str, ours_first: bool
) -> None:
    put(tmp_path, (room,), "VALUE = 1\n")
    lines = [f"import {room}", "from heterps import Client"]
    done = run("\n".join(reversed(lines) if ours_first else lines) + "\nprint('went on')\n")
    assert done.returncode == 1, done.stdout
    said = done.stderr.splitlines()[-1]
    assert str(tmp_path / room) in said
    assert str(site / room) in said
    assert "rename yours" in said
    assert "went on" not in done.stdout


def test_a_script_keeps_the_names_that_it_needs_nothing_of_ours_for(
    run: Run, tmp_path: Path
) -> None:
    put(tmp_path, ("scheduler",), "def cosine():\n    return 'mine'\n")
    done = run(
        "from heterps import SparseEmbedding\nimport scheduler\n"
        "print(scheduler.cosine(), SparseEmbedding.__name__)\n"
    )
    assert done.stdout == "mine SparseEmbedding\n", done.stderr


def test_imports_are_followed_to_where_the_name_is_used(tmp_path: Path) -> None:
    put(tmp_path, ("workers", "scheduler"), "")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/__init__.py").write_text("from . import tower\n")
    (tmp_path / "parts/tower.py").write_text("import scheduler\n\nfrom workers import mine\n")
    (tmp_path / "model.py").write_text("import torch\nfrom parts import tower\n")
    said = clash(tmp_path / "model.py", [tmp_path], IN_A_WORKER)
    assert said.startswith(f"{tmp_path / 'parts/tower.py'}:3: imports 'workers'")
    assert str(tmp_path / "workers/__init__.py") in said
    assert str(ROOT / "workers") in said
    assert clash(tmp_path / "model.py", [tmp_path], ("ps",)) == ""


def test_a_folder_that_has_the_name_and_no_such_module_is_no_clash(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers/notes.py").write_text("")
    (tmp_path / "model.py").write_text("from workers.data.keys import mix\nimport workers\n")
    assert clash(tmp_path / "model.py", [tmp_path], IN_A_WORKER) == ""
    (tmp_path / "model.py").write_text("from workers import notes\n")
    assert "notes.py" in clash(tmp_path / "model.py", [tmp_path], IN_A_WORKER)


def test_what_is_loaded_of_ours_is_known() -> None:
    assert "chassis" in loaded()


def test_a_python_path_that_would_hide_ours_has_ours_first(tmp_path: Path) -> None:
    assert python_path(None) is None
    assert python_path(str(tmp_path)) == str(tmp_path)
    (tmp_path / "ps.py").write_text("")
    assert python_path(str(tmp_path)) == f"{ROOT}{os.pathsep}{tmp_path}"


def test_links_on_the_way_to_the_packages_change_nothing(
    installed: tuple[Path, Path], tmp_path: Path
) -> None:
    """As where an environment lies on a linked disk."""
    python, _ = installed
    (tmp_path / "linked").symlink_to(python.parents[1])
    done = subprocess.run(
        [tmp_path / "linked/bin/python", "-c", "from heterps import Client; print(Client)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_copy_of_our_packages_is_no_clash(tmp_path: Path) -> None:
    """As where a job's code is a checkout of this project with a model in it."""
    (tmp_path / "ps").mkdir()
    (tmp_path / "ps/__init__.py").write_bytes((ROOT / "ps/__init__.py").read_bytes())
    (tmp_path / "model.py").write_text("from ps import ParameterClient\n")
    assert clash(tmp_path / "model.py", [tmp_path], IN_A_WORKER) == ""
    assert clash(tmp_path / "model.py", [ROOT], IN_A_WORKER) == ""


def test_our_own_packages_are_no_clash_beside_folders_of_their_names(tmp_path: Path) -> None:
    """As for a module run from a checkout, whose folder has one folder for each package."""
    (tmp_path / "ps").mkdir()
    (tmp_path / "ps/__init__.py").write_text("")
    (tmp_path / "model.py").write_text("from workers.stage import rows\n")
    assert clash(tmp_path / "model.py", [ROOT, tmp_path], IN_A_WORKER) == ""
