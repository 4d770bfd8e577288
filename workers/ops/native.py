"""What the ops share: which tensors the native kernels take, and how they are handed over."""

import torch
from torch import Tensor

from workers.ops import _ops

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEVICES = ("cpu", "cuda") if _ops.has_cuda else ("cpu",)


def native_for(tensor: Tensor) -> bool:
    """Whether a native kernel serves this tensor's device and dtype."""
    return tensor.device.type in _DEVICES and tensor.dtype in KERNEL_DTYPES


def native(tensor: Tensor) -> Tensor:
    """The tensor as the kernels take it: in C order, without autograd, which DLPack refuses."""
    return tensor.detach().contiguous()


def stream(tensor: Tensor) -> int:
    """The handle of the tensor's current CUDA stream; 0 on a CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
