"""Tensors of a state as one safetensors file without a name, where they are not to be in memory."""

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workers.device.mapped import bytes_in, lies_in
from workers.model.saved.dense_file import chunks_of

_LENGTH = 8  # bytes, of the header's length
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


def packed(
    tensors: Mapping[str, Tensor], save: Callable[[dict[str, Tensor]], bytes]
) -> bytes | memoryview:
    """Tensors on the host as a safetensors file, which lies in a file where any of them does.

    Args:
        save: makes it in memory.
    """
    folder = next((found for one in tensors.values() if (found := lies_in(one))), None)
    if folder is None:
        return save(dict(tensors))
    view, at = bytes_in(folder, sum(map(len, chunks_of(tensors)))), 0
    for chunk in chunks_of(tensors):
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
    return view


def unpacked(data: memoryview) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which are parts of it.

    Raises:
        ValueError: it is none.
    """
    begin = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    header = json.loads(bytes(data[_LENGTH:begin]))
    values = torch.frombuffer(data, dtype=torch.uint8)[begin:]
    found = {}
    for name, one in header.items():
        if name == "__metadata__":
            continue
        (first, last), dtype = one["data_offsets"], _DTYPES[one["dtype"]]
        part = values[first:last]
        if (part.storage_offset() * part.itemsize) % dtype.itemsize:
            part = part.clone()
        found[name] = part.view(dtype).view(one["shape"])
    return found
