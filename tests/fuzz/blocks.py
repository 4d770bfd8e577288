"""The one parser in C++: blocks of rows, for libFuzzer or to be given files."""

import shutil
import subprocess
from pathlib import Path

from tests.fuzz.targets import ROOT

NAME = "blocks"
_ENGINE = ROOT / "ps" / "engine"
_FLAGS = ("-std=c++20", "-O1", "-g1", "-DHETERPS_PORTABLE", "-pthread", f"-I{_ENGINE}")


def build(folder: Path, *, fuzzer: bool) -> Path | None:
    """The program; None where no compiler is there that can.

    Args:
        folder: to build in.
        fuzzer: with libFuzzer, which is clang's; else it takes the names of files.

    Raises:
        RuntimeError: it does not compile.
    """
    compiler = shutil.which("clang++") or (None if fuzzer else shutil.which("g++"))
    if compiler is None:
        return None
    sanitizers = "fuzzer,address,undefined" if fuzzer else "address,undefined"
    how = [] if fuzzer else ["-DHETERPS_REPLAY"]
    sources = [p for p in sorted(_ENGINE.rglob("*.cc")) if p.parent.name != "bindings"]
    program = folder / NAME
    command = [compiler, *_FLAGS, *how, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    command += [*map(str, sources), str(Path(__file__).parent / "native" / "blocks.cc")]
    built = subprocess.run(
        [*command, "-o", str(program)], capture_output=True, text=True, check=False
    )
    if built.returncode != 0:
        raise RuntimeError(built.stderr[-4000:])
    return program
