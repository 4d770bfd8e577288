"""The faces of the rooms: every public name is there, and typed as such."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FACES = ("ps", "scheduler", "heterps")


@pytest.mark.parametrize("room", FACES)
def test_every_name_is_there(room: str) -> None:
    face = import_module(room)
    assert face.__all__
    for name in face.__all__:
        assert getattr(face, name) is not None
        assert name in dir(face)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = face.no_such_name


@pytest.mark.parametrize("room", FACES)
def test_types_name_the_same_homes(room: str) -> None:
    typed = {
        (node.module, alias.name)
        for node in ast.parse((ROOT / room / "__init__.pyi").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    face = import_module(room)
    assert {name for _, name in typed} == set(face.__all__)
    for module, name in typed:
        assert getattr(import_module(str(module)), name) is getattr(face, name)


@pytest.mark.parametrize("room", FACES)
def test_a_face_costs_nothing(room: str) -> None:
    heavy = "{'numpy', 'torch', 'grpc', 'redis'} & set(sys.modules)"
    code = f"import sys, {room}; print(sorted({heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
