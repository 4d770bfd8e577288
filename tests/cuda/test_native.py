"""Which tensors the native kernels take."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from workers.ops import _ops, native, native_for
from workers.ops.grouped_ffn import backend_for

T4, V100, A100, L4, H100, B200 = (7, 5), (7, 0), (8, 0), (8, 9), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("built", "gpu", "takes"),
    [
        (80, V100, False),
        (80, T4, False),
        (80, A100, True),
        (80, L4, True),
        (80, H100, True),
        (80, B200, True),
        (0, A100, False),
    ],
)
def test_a_gpu_older_than_the_kernels_is_served_by_torch(
    built: int, gpu: tuple[int, int], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native._ops, "cuda_capability", built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    with FakeTensorMode():
        tensor = torch.empty(2, 3, device="cuda")
    assert native_for(tensor) == takes


def test_kernels_that_are_not_there_cannot_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native._ops, "cuda_capability", 80)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: T4)
    monkeypatch.setenv("HETERPS_GROUPED_FFN", "native")
    with FakeTensorMode():
        rows, weights = torch.empty(2, 4, device="cuda"), torch.empty(1, 4, 4, device="cuda")
    with pytest.raises(ValueError, match="HETERPS_GROUPED_FFN=native: no kernels here for"):
        backend_for(rows, weights, weights)
    monkeypatch.delenv("HETERPS_GROUPED_FFN")
    assert backend_for(rows, weights, weights) == "loop"


def test_a_build_without_cuda_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native._ops, "cuda_capability", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    with FakeTensorMode():
        assert not native_for(torch.empty(2, device="cuda"))


def test_dtypes_and_devices() -> None:
    assert native_for(torch.empty(2))
    assert native_for(torch.empty(2, dtype=torch.bfloat16))
    assert not native_for(torch.empty(2, dtype=torch.int32))
    assert not native_for(torch.empty(2, device="meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or a torch without CUDA")
def test_this_gpu() -> None:
    major, minor = torch.cuda.get_device_capability()
    tensor = torch.empty(2, device="cuda")
    assert native_for(tensor) == (0 < _ops.cuda_capability <= 10 * major + minor)


@pytest.mark.parametrize(
    ("gpu", "own", "backend"),
    [
        (A100, True, "native"),
        (H100, True, "native"),
        (H100, False, "grouped_mm"),
        (B200, True, "grouped_mm"),
    ],
)
def test_products_of_hopper_are_our_own_where_they_were_built(
    gpu: tuple[int, int], own: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native._ops, "cuda_capability", 80)
    monkeypatch.setattr(native._ops, "products_sm90", own)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    with FakeTensorMode():
        rows = torch.empty(2, 8, device="cuda", dtype=torch.bfloat16)
        weights = torch.empty(1, 8, 8, device="cuda", dtype=torch.bfloat16)
    assert backend_for(rows, weights, weights) == backend
