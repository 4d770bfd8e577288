"""The devices that ops are tested on."""

import importlib

import pytest
import torch
from torch import Tensor

OPS = ["embedding", "gather", "grouped_ffn", "quantize", "route"]


def _never(tensor: Tensor) -> bool:
    return False


@pytest.fixture(params=["cpu", "cuda"])
def native_device(request: pytest.FixtureRequest) -> str:
    """Where kernels run."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    return str(request.param)


@pytest.fixture(params=["cpu", "without kernels", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where ops run: by a kernel, or by torch's operators where there is none for the device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    if request.param != "without kernels":
        return str(request.param)
    for op in OPS:
        monkeypatch.setattr(importlib.import_module(f"workers.ops.{op}"), "native_for", _never)
    return "cpu"
