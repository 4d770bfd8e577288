"""The stages of bench.gpu. Each gives status, seconds, and what it found."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.pages import ROOT

HOOK = Path(__file__).parent / "emulated"
LIMIT_S = 3600.0  # of each part
PROCESSES = min(8, max(1, (os.cpu_count() or 1) // 2))  # of tests, which are to share one GPU
# All but the test of the emulation, which leaves fibers waiting: that looks like an overflow.
SANITIZED = ("route", "gather", "embedding", "quantize", "row_cache", "grouped_ffn")


@dataclass(frozen=True, slots=True)
class Place:
    """Where stages run: on a GPU, or on an emulated one.

    Args:
        emulated: on one that is emulated.
        limit_s: seconds that each part of a stage may take.
    """

    emulated: bool
    limit_s: float = LIMIT_S

    def environment(self) -> dict[str, str]:
        """That of processes which are to find the kernels."""
        if not self.emulated:
            return dict(os.environ)
        from tests.cuda.emulate import build

        path = os.pathsep.join(filter(None, (str(HOOK), os.environ.get("PYTHONPATH"))))
        return os.environ | {"PYTHONPATH": path, "HETERPS_EMULATED_OPS": str(build.module())}


def gpu_name() -> str:
    """That of the first GPU; "" where there is none, or a torch that knows none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def missing() -> list[str]:
    """What a GPU stage needs that is not here, in words."""
    import torch

    wanted = []
    if torch.version.cuda is None:
        wanted.append(
            f"a torch with CUDA (this is {torch.__version__}): make clean, TORCH=torch make setup"
        )
    if not torch.cuda.is_available():
        wanted.append("an NVIDIA GPU, of Ampere or later, and its driver")
    elif torch.cuda.get_device_capability() < (8, 0):
        wanted.append(f"a GPU of Ampere or later (this is a {torch.cuda.get_device_name()})")
    if not (shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")):
        wanted.append("nvcc, of CUDA 12.0 or later")
    return wanted


def _run(
    place: Place, command: Sequence[str | Path], environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """What came of a command; its last line, and the end of what it said where it failed."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=place.limit_s,
            check=False,
        )
        failed, said = done.returncode != 0, done.stdout
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        failed, said = True, text.decode(errors="replace") if isinstance(text, bytes) else text
        said += f"\nended after {place.limit_s:.0f} s"
    result = {"status": "failed" if failed else "passed", "seconds": time.monotonic() - began}
    return {**result, "says": said[-4000:] if failed else said.strip().rpartition("\n")[2]}


def _together(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One stage of several parts: it has passed where they all have."""
    passed = all(part["status"] == "passed" for part in parts.values())
    seconds = sum(part["seconds"] for part in parts.values())
    return {"status": "passed" if passed else "failed", "seconds": seconds, "parts": parts}


def build(place: Place) -> dict[str, Any]:
    """The native ops with their CUDA kernels, those of Hopper as well."""
    if place.emulated:
        command = "from tests.cuda.emulate import build; build.driver(); print(build.module())"
        return _together({"ops": _run(place, [sys.executable, "-c", command])})
    code = "from workers.ops import _ops; assert _ops.cuda_capability and _ops.products_sm90"
    kernels: list[str | Path] = [sys.executable, "-c", code]
    built = _run(place, kernels)
    if built["status"] == "passed":
        return _together({"built before": built})
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    parts = {"cutlass": _run(place, [*pip, "--no-deps", "nvidia-cutlass"])}
    options = ["--no-deps", "--no-build-isolation", "-C", "cmake.define.HETERPS_CUDA=ON"]
    parts["ops"] = _run(place, [*pip, *options, "-e", "."])
    parts["kernels"] = _run(place, kernels)
    return _together(parts)


def test(place: Place) -> dict[str, Any]:
    """The ops against references; a sanitizer watches the kernels' memory."""
    if place.emulated:
        from tests.cuda.emulate import build as emulation

        code = "from tests.cuda.emulate import build as b; print(b.driver(b.ADDRESSES))"
        built = _run(place, [sys.executable, "-c", code])
        parts = {"sanitizer's build": built}
        if built["status"] == "passed":
            program = emulation.driver(emulation.ADDRESSES)
            for op in SANITIZED:
                parts[f"sanitizer, {op}"] = _run(place, [program, op, "4", "1"])
        only = ["-m", "not exhaustive", "tests/cuda", "-k", "emulated and (opcheck or dtypes)"]
        parts["ops"] = _run(place, [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *only])
        return _together(parts)
    watch = shutil.which("compute-sanitizer")
    on_gpu = ["-m", "pytest", "-q", "-m", "gpu and not exhaustive", "-n", str(PROCESSES)]
    parts = {"ops": _run(place, [sys.executable, *on_gpu, "tests/cuda"])}
    whole = ["tests/workers/device", "tests/heterps/commands/test_train_modes.py"]
    parts["training"] = _run(place, [sys.executable, *on_gpu, *whole])
    if watch:
        watched = [watch, "--target-processes", "all", "--error-exitcode", "99"]
        # torch.compile's tests run the same kernels, and compile for most of their time.
        eager = ["--ignore=tests/cuda/test_compiled.py", "tests/cuda"]
        parts["sanitizer"] = _run(place, [*watched, sys.executable, *on_gpu, *eager])
    return _together(parts) | {"compute_sanitizer": watch is not None}


def train(place: Place) -> dict[str, Any]:
    """A few steps of two jobs on a worker with a GPU; throughput and loss."""
    parts = {}
    for job in ("flights", "moe_lm"):
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "found.json"
            command = [sys.executable, "-m", "bench.gpu.training", job, str(found)]
            command += ["--emulated"] if place.emulated else []
            parts[job] = _run(place, command, place.environment())
            if found.exists():
                parts[job] |= json.loads(found.read_text())
    return _together(parts)


def moe(place: Place, *options: str) -> dict[str, Any]:
    """The results of bench.moe, with options of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.moe", "--into", folder]
        command += ["--emulated"] if place.emulated else ["--device", "cuda"]
        command += options
        stage = _run(place, command, place.environment())
        found = Path(folder) / "moe.json"
        if found.exists():
            stage["moe"] = json.loads(found.read_text())
    return stage
