"""What the ops share: which tensors the native kernels take, and how they are handed over.

Where each op runs: CPU and CUDA float16, bfloat16, float32 and float64 in native code (sums of the
16-bit types in float32). Anything else (CUDA tensors where `_ops` was built without CUDA, or of a
GPU older than it was built for) takes the equivalent made of torch's own operators; `native_for`
says which. To build the kernels, install where nvcc and an NVIDIA GPU are present, or with the
CMake option HETERPS_CUDA=ON.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from workers.ops import _ops

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def native_for(tensor: Tensor) -> bool:
    """Whether a native kernel serves this tensor's device and dtype."""
    if tensor.dtype not in KERNEL_DTYPES:
        return False
    if tensor.device.type != "cuda":
        return tensor.device.type == "cpu"
    # Without an image for it a launch fails; from the lowest capability on there is one.
    return bool(_ops.cuda_capability) and _capability(tensor.device) >= _ops.cuda_capability


def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def on_cuda(tensor: Tensor) -> bool:
    """Whether the native op of this tensor is a CUDA kernel, to which its caller gives scratch."""
    return tensor.is_cuda


def native(tensor: Tensor) -> Tensor:
    """The tensor as the kernels take it: in C order, without autograd, which DLPack refuses."""
    return (tensor.detach() if tensor.requires_grad else tensor).contiguous()


_ANY = nullcontext()


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """In it kernels are launched on the GPU of this tensor; nothing for one on a CPU."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else _ANY


def stream(tensor: Tensor) -> int:
    """The handle of the tensor's current CUDA stream; 0 on a CPU."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0
