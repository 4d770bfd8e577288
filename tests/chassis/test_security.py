"""What is received is data: no room has a reader that runs what it reads."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("heterps", "scheduler", "workers", "ps", "chassis", "protos")
READERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# torch's own: objects of collectives, and tensors' files unless they hold weights alone.
CALLS = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
OPTIONS = {"allow_pickle": True, "weights_only": False}


def unpickles(tree: ast.Module) -> list[int]:
    """The lines with something that runs what it reads."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                named = {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(module)):
                named = {module.partition(".")[0]}
            case ast.Attribute(attr=name) if name in CALLS:
                named = READERS
            case ast.keyword(arg=str(option), value=ast.Constant(value=value)) if (
                OPTIONS.get(option, ...) is value
            ):
                named = READERS
            case _:
                continue
        if named & READERS:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_is_unpickled(room):
    files = [*(ROOT / room).rglob("*.py")]
    assert files
    found = {
        str(file.relative_to(ROOT)): lines
        for file in files
        if (lines := unpickles(ast.parse(file.read_text())))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "numpy.load(file, allow_pickle=True)",
        "torch.load(file, weights_only=False)",
        "dist.all_gather_object(out, mine)",
    ],
)
def test_what_would_be_found(text):
    assert unpickles(ast.parse(text)) == [1]
