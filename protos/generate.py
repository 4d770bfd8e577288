"""Generate the stubs from the `.proto` files, or check that they are current.

Usage: python -m protos.generate [--check]
"""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOM = Path(__file__).resolve().parent


def generate(into: Path) -> list[Path]:
    """Write every stub under `into`/protos and return their paths, relative to `into`."""
    from grpc_tools import protoc

    sources = sorted(ROOM.glob("*.proto"))
    scripts = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"--plugin={scripts / 'protoc-gen-mypy'}",
        f"--plugin={scripts / 'protoc-gen-mypy_grpc'}",
        f"-I{ROOM.parent}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={into}",
        f"--grpc_python_out={into}",
        f"--mypy_out=quiet:{into}",
        f"--mypy_grpc_out=quiet:{into}",
        *(str(source) for source in sources),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; its message is above")
    return sorted(p.relative_to(into) for p in (into / "protos").glob("*_pb2*"))


def main() -> int:
    """Regenerate in place, or with --check compare and exit 1 on a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 when stale")
    check = parser.parse_args().check
    if not check:
        print(f"wrote {len(generate(ROOM.parent))} stubs")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        stale = [
            str(path)
            for path in generate(fresh)
            if not (ROOM.parent / path).exists()
            or (fresh / path).read_bytes() != (ROOM.parent / path).read_bytes()
        ]
    if stale:
        print("stale stubs: " + ", ".join(stale) + "; run: python -m protos.generate")
        return 1
    print("stubs are current")
    return 0


if __name__ == "__main__":
    sys.exit(main())
