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
SOURCE = ROOT / "cuda" / "src" / "sm90" / "product.cu"
KINDS = ("kRows", "kTransposed", "kWeights")
TYPES = ("bfloat16_t", "half_t")
TILES = {"Cooperative": "HGMMA.64x256x16.F32", "Pingpong": "HGMMA.64x128x16.F32"}


def test_every_kind_type_and_tile_is_built() -> None:
    built = (ROOT / "cuda" / "CMakeLists.txt").read_text()
    for name, values in {"kind": KINDS, "type": TYPES, "tile": TILES}.items():
        assert f"foreach({name} {' '.join(values)})" in built


def run(*command: str | Path) -> str:
    """What a command of the fetched toolkit says."""
    if not (BINARIES / "nvcc").exists() or not CUTLASS.exists():
        pytest.fail(f"no compiler in {TOOLS}: `make cuda-tools` fetches it")
    environment = os.environ | {"PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_to_what_hopper_has(kind: str, dtype: str, tile: str, tmp_path: Path) -> None:
    # As cuda/CMakeLists.txt has it.
    flags = ["-O3", "-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr"]
    flags += [f"-DHETERPS_KIND={kind}", f"-DHETERPS_TYPE={dtype}", f"-DHETERPS_TILE={tile}"]
    paths = [f"-I{ROOT / 'cuda' / 'include'}", "-isystem", CUTLASS]
    built = tmp_path / "product.o"
    target = "-gencode=arch=compute_90a,code=sm_90a"
    said = run(BINARIES / "nvcc", target, *flags, *paths, "-Xptxas=-v", "-c", SOURCE, "-o", built)
    # Neither tensor cores that wait for each instruction nor sums that do not fit into registers.
    assert "wgmma.mma_async instructions are serialized" not in said
    spills = [line for line in said.splitlines() if "spill" in line]
    assert spills
    assert all("0 bytes spill stores" in line for line in spills)
    code = run(BINARIES / "cuobjdump", "-sass", built)
    assert TILES[tile] in code
    assert (f"{TILES[tile]}.BF16" in code) == (dtype == "bfloat16_t")
    assert "UTMALDG" in code


@pytest.mark.exhaustive
def test_tiles_use_what_ampere_has(tmp_path: Path) -> None:
    built = tmp_path / "tiles.o"
    flags = ["-O3", "-std=c++20", "-gencode=arch=compute_80,code=sm_80"]
    source = ROOT / "cuda" / "src" / "grouped_ffn.cu"
    run(BINARIES / "nvcc", *flags, f"-I{ROOT / 'cuda' / 'include'}", "-c", source, "-o", built)
    code = run(BINARIES / "cuobjdump", "-sass", built)
    copies, matrices, stores = "LDGSTS.E.BYPASS.128", "LDSM.16.MT88.4", "STG.E.128"
    for instruction in (copies, matrices, "HMMA.16816.F32.BF16", "HMMA.16816.F32 ", stores):
        assert instruction in code, instruction
