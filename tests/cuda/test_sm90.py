"""The products of Hopper compile, and use its tensor cores and copies; one at a time.

A minute and 3.5 GB each: `make test-all`, which fetches the compiler and what it needs.
"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "cuda-tools"
BINARIES = TOOLS / "nvidia" / "cu13" / "bin"
CUTLASS = TOOLS / "cutlass_library" / "source" / "include"
PRODUCTS = sorted((ROOT / "cuda" / "src" / "sm90").glob("*_*.cu"))


def test_every_kind_and_type_is_there() -> None:
    kinds = {"rows": "kRows", "transposed": "kTransposed", "weights": "kWeights"}
    types = {"bf16": "bfloat16_t", "fp16": "half_t"}
    names = {f"{kind}_{dtype}" for kind in kinds for dtype in types}
    assert {path.stem for path in PRODUCTS} == names
    built = (ROOT / "cuda" / "CMakeLists.txt").read_text()
    for path in PRODUCTS:
        kind, dtype = path.stem.split("_")
        text = path.read_text()
        assert f"<ProductKind::{kinds[kind]}, cutlass::{types[dtype]}>" in text
        assert f"src/sm90/{path.name}" in built


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", PRODUCTS, ids=lambda path: path.stem)
def test_compiles_to_what_hopper_has(source: Path, tmp_path: Path) -> None:
    if not (BINARIES / "nvcc").exists() or not CUTLASS.exists():
        pytest.fail(f"no compiler in {TOOLS}: `make cuda-tools` fetches it")
    environment = os.environ | {"PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1200, check=False, env=environment
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    # As cuda/CMakeLists.txt has it.
    flags = ["-O3", "-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr"]
    paths = [f"-I{ROOT / 'cuda' / 'include'}", "-isystem", CUTLASS]
    built = tmp_path / "product.o"
    target = "-gencode=arch=compute_90a,code=sm_90a"
    said = run(BINARIES / "nvcc", target, *flags, *paths, "-Xptxas=-v", "-c", source, "-o", built)
    # Tensor cores that wait for each instruction, or sums that do not fit into registers.
    assert "wgmma.mma_async instructions are serialized" not in said
    assert "bytes spill stores" in said
    assert all("0 bytes spill stores" in line for line in said.splitlines() if "spill" in line)
    code = run(BINARIES / "cuobjdump", "-sass", built)
    assert "HGMMA.64x256x16.F32" in code
    assert (
        ".BF16" in code if source.stem.endswith("bf16") else "HGMMA.64x256x16.F32.BF16" not in code
    )
    assert "UTMALDG" in code
