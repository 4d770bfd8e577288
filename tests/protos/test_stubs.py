"""The committed stubs and the versions of the libraries that they run with."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("library", "files", "pattern"),
    [
        ("protobuf", "*_pb2.py", r"Protobuf Python Version: ([\d.]+)"),
        ("grpcio", "*_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
    ],
)
def test_what_is_asked_for_is_new_enough_for_the_stubs(
    library: str, files: str, pattern: str
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = next(one for one in project["dependencies"] if one.startswith(f"{library}>="))
    made_by = {
        found[1]
        for path in (ROOT / "protos").glob(files)
        if (found := re.search(pattern, path.read_text()))
    }
    assert made_by == {asked.removeprefix(f"{library}>=")}
