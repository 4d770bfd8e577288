"""The CPU twins built with sanitizers, for each instruction set that this processor has."""

import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "cuda"
NATIVE = Path(__file__).parent / "native"
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# As cuda/CMakeLists.txt compiles the blocks of grouped_ffn: tiling, flags of the compiler.
INSTRUCTION_SETS = {
    "portable": ("16,4", []),
    "avx2": ("32,6", ["-mavx2", "-mfma"]),
    "tiles of avx512": ("64,12", []),  # on any processor
    "avx512": ("64,12", ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]),
}
EVERY = pytest.mark.exhaustive


def built(program: Path, flags: list[str], *sources: Path) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    objects: list[Path] = []
    compiling = []
    for source in sources:
        objects.append(program.with_name(f"{program.name}-{source.stem}.o"))
        command = [compiler, "-std=c++20", "-g1", "-Wall", "-Wextra", "-Wno-psabi", *SANITIZE]
        command += [*flags, f"-I{CUDA / 'include'}", f"-I{CUDA / 'src'}", "-c", str(source)]
        compiling.append(
            subprocess.Popen([*command, "-o", objects[-1]], stderr=subprocess.PIPE, text=True)
        )
    for process in compiling:
        errors = process.communicate(timeout=300)[1]
        assert process.returncode == 0, errors[-4000:]
    linked = subprocess.run(
        [compiler, *SANITIZE, *objects, "-o", program], capture_output=True, text=True, check=False
    )
    if "cannot find" in linked.stderr and "san" in linked.stderr:
        pytest.skip("the compiler lacks the address sanitizer")
    assert linked.returncode == 0, linked.stderr[-4000:]
    return program


def run(program: Path) -> None:
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("portable", "-O0"),
        pytest.param("portable", "-O3", marks=EVERY),
        pytest.param("avx2", "-O1", marks=EVERY),
        pytest.param("tiles of avx512", "-O1", marks=EVERY),
        pytest.param("avx512", "-O1", marks=EVERY),
    ],
)
def test_grouped_ffn_stays_in_its_arrays(name: str, level: str, tmp_path: Path) -> None:
    tiling, flags = INSTRUCTION_SETS[name]
    has = Path("/proc/cpuinfo").read_text().split()
    if not all(flag.removeprefix("-m") in has for flag in flags):
        pytest.skip(f"a processor without {name}")
    # The one name that grouped_ffn.cpp knows without HETERPS_X86_KERNELS.
    blocks = ["-DHETERPS_INSTRUCTIONS=portable", f"-DHETERPS_TILING={tiling}"]
    files = ("gather", "grouped_ffn", "grouped_ffn_blocks", "linear", "linear_blocks")
    sources = [CUDA / "src" / f"{file}.cpp" for file in files]
    run(built(tmp_path / "ffn", [level, *flags, *blocks], *sources, NATIVE / "ffn.cc"))


@pytest.mark.exhaustive
def test_the_other_ops_stay_in_their_arrays(tmp_path: Path) -> None:
    products = ("ffn", "linear")
    every = sorted((CUDA / "src").glob("*.cpp"))
    sources = [p for p in every if not any(name in p.stem for name in products)]
    run(built(tmp_path / "ops", ["-O1"], *sources, NATIVE / "ops.cc"))
