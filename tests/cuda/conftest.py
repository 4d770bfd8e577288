"""The devices that ops are tested on."""

import importlib
import importlib.machinery
import importlib.util
import shutil
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.cuda.emulate import build

OPS = ["embedding", "gather", "grouped_ffn", "quantize", "route", "routed_ffn", "row_cache"]


def _never(tensor: Tensor) -> bool:
    return False


def _always(tensor: Tensor) -> bool:
    return True


@pytest.fixture(scope="session")
def emulated_ops() -> ModuleType:
    """The native module of which arrays in host memory go to CUDA kernels, on an emulated GPU."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    loader = importlib.machinery.ExtensionFileLoader("_ops", str(build.module()))
    spec = importlib.util.spec_from_loader("_ops", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = str(request.param)
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    for op in OPS:
        module = importlib.import_module(f"workers.ops.{op}")
        if kind == "without kernels":
            monkeypatch.setattr(module, "native_for", _never)
        if kind == "emulated":
            monkeypatch.setattr(module, "_ops", request.getfixturevalue("emulated_ops"))
            if hasattr(module, "on_cuda"):
                monkeypatch.setattr(module, "on_cuda", _always)
    return "cuda" if kind == "cuda" else "cpu"


CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", "emulated", CUDA])
def native_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where kernels run."""
    return _device(request, monkeypatch)


@pytest.fixture(params=["cpu", "without kernels", "emulated", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where ops run: by a kernel, or by torch's operators where there is none for the device."""
    return _device(request, monkeypatch)
