"""Every kernel, on an emulated GPU, beside its CPU twin (see `docs/testing.md`)."""

import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.cuda.emulate import build
from tests.cuda.emulate.translate import Unknown, translate

OPS = ["machine", "route", "gather", "embedding", "quantize", "row_cache", "grouped_ffn"]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def fuzzed(program: Path, op: str, rounds: int, seed: int = 1) -> str:
    """The kernels that `rounds` of an op ran."""
    command = [program, op, str(rounds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def driver() -> Path:
    return build.driver()


@pytest.fixture(
    scope="module", params=[build.ADDRESSES, build.THREADS], ids=["addresses", "threads"]
)
def sanitized(request: pytest.FixtureRequest) -> Path:
    return build.driver(request.param)


@pytest.mark.parametrize("op", OPS)
def test_kernels_equal_their_twins(op: str, driver: Path) -> None:
    fuzzed(driver, op, 40)


def test_no_kernel_is_left_out(driver: Path) -> None:
    written = {
        name
        for text in build.sources().values()
        for name in re.findall(
            r"__global__[^;{]*?(\w+)\(", re.sub(r"__launch_bounds__\([^)]*\)", "", text)
        )
    }
    assert len(written) > 15
    assert set(fuzzed(driver, "all", 8).split()) == {"machine", *written}


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", OPS)
def test_kernels_equal_their_twins_at_length(op: str, driver: Path) -> None:
    fuzzed(driver, op, 1000, seed=1000)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", [op for op in OPS if op != "machine"])  # which leaves fibers waiting
def test_sanitizers_are_silent(op: str, sanitized: Path) -> None:
    fuzzed(sanitized, op, 30)


def test_the_emulated_module_takes_arrays_of_a_cpu_for_those_of_a_gpu(
    emulated_ops: ModuleType,
) -> None:
    assert emulated_ops.cuda_capability == 80
    outputs = torch.zeros(4, 1, dtype=torch.int32), *torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="workspace: expected an array for a CUDA device"):
        emulated_ops.route(torch.zeros(4, 3), 1, *outputs, torch.zeros(4, dtype=torch.int64))


KERNEL = """\
__global__ void add(int* x) {  // __ldg in a comment
  __shared__ int tile[kTile];
#pragma unroll 1
  __syncthreads();
}
void f(void* stream) {
  add<<<dim3(1, 2),
        64, 0, static_cast<cudaStream_t>(stream)>>>(
      x, g(1));
  both<T, 4><<<n, 32>>>(x);
}
"""


def test_translation_keeps_lines() -> None:
    lines = translate(KERNEL, "a.cu").splitlines()[2:]
    assert len(lines) == len(KERNEL.splitlines())
    assert lines[1] == "  auto& tile = emulate::shared<int[kTile]>([] {});"
    assert lines[2] == ""
    assert lines[6].startswith('  emulate::launch("add", dim3(1, 2), 64, [=] { add(')
    assert lines[7].endswith("x, g(1)); }, static_cast<cudaStream_t>(stream))")
    assert lines[9] == '  emulate::launch("both", n, 32, [=] { both<T, 4>(x); });'


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("int x = __ldg(p);", "__ldg"),
        ("extern __shared__ int tile[];", "extern __shared__"),
        ("__shared__ int a, b;", "__shared__ of this form"),
        ("f<<<1, 32, bytes>>>(x);", "such settings"),
        ("f<<<1>>>(x);", "such settings"),
        ('asm("bar.sync 0;");', "asm"),
        ("atomicCAS(p, 1, 2);", "atomicCAS"),
        ("cudaDeviceSynchronize();", "cudaDeviceSynchronize"),
        ("__constant__ int c;", "__constant__"),
    ],
)
def test_translation_refuses_what_it_does_not_know(line: str, named: str) -> None:
    with pytest.raises(
        Unknown, match=rf"^a\.cu:2: {re.escape(named)}|^a\.cu:2: a launch with such"
    ):
        translate(f"\n{line}\n", "a.cu")
