"""A model's state as it is saved: each tensor once, whatever layers share it; loaded tied."""

from collections.abc import Mapping

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from workers.model.code.entry import ModelError


def single(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state on the host, contiguous, with tensors that several names share under the first."""
    found: dict[str, Tensor] = {}
    seen: set[object] = set()
    memory: set[int] = set()
    for name, tensor in state.items():
        identity = _identity(tensor)
        if identity in seen:
            continue
        if tensor.numel():
            seen.add(identity)
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        if own.numel() and place in memory:  # a part of another tensor
            own = own.clone()
        memory.add(place)
        found[name] = own
    return found


def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a model a state of `single`; every name must be there, but those of shared tensors.

    Raises:
        ModelError: a tensor is missing, left over, or of another shape.
    """
    names: dict[object, list[str]] = {}
    for name, tensor in model.state_dict().items():
        names.setdefault(_identity(tensor) if tensor.numel() else name, []).append(name)
    whole = dict(state)
    for shared in names.values():
        value = next((state[name] for name in shared if name in state), None)
        if value is not None:
            whole |= {name: value for name in shared if name not in state}
    try:
        model.load_state_dict(whole, strict=True)
    except RuntimeError as error:
        raise ModelError(f"{type(model).__name__}: its saved weights do not fit: {error}") from None


def check_state(model: nn.Module) -> None:
    """Refuse what could not be saved after training.

    Raises:
        ModelError: names it.
    """
    where = type(model).__name__
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{where}: {name!r} has no shape before a first forward; expected layers that are "
                "told their sizes, such as nn.Linear(16, 8) in place of nn.LazyLinear(8)"
            )
    kinds: set[torch.dtype] = set()
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            kind = str(value.layout) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(
                f"{where}: {name!r} is {kind}, which a saved model cannot hold; expected dense "
                "tensors in its state_dict: register others with persistent=False, or make them "
                "when the model is built"
            )
        if value.dtype not in kinds and not _savable(value.dtype):
            raise ModelError(f"{where}: {name!r} is {value.dtype}, which safetensors cannot hold")
        kinds.add(value.dtype)


def _identity(tensor: Tensor) -> object:
    return (
        tensor.untyped_storage().data_ptr(),
        str(tensor.device),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


def _savable(dtype: torch.dtype) -> bool:
    try:
        save({"x": torch.empty(0, dtype=dtype)})
    except Exception:
        return False
    return True
