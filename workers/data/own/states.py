"""States of iterables as JSON: what `state_dict` gives, and just that again, without pickle.

What JSON holds stays as it is. All else is an object of one key: tensors, arrays, NumPy's scalars,
bytes, tuples, sets, numbers that are not finite, and dicts whose keys are no text.
"""

import base64
import math
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

_KIND: Final = "__heterps__"
_ARRAYS: Final = "biufcmM"  # kinds of NumPy's types without objects


def encoded(state: Any, where: str = "state") -> Any:
    """A state as JSON, of which later changes of the state change nothing.

    Raises:
        TypeError: something in it is of another type; says where.
    """
    kind = type(state)
    if state is None or kind in (bool, int, str):
        return state
    if kind is float:
        return state if math.isfinite(state) else _tagged("float", state.hex())
    if kind is list:
        return [encoded(one, f"{where}[{at}]") for at, one in enumerate(state)]
    if kind is dict:
        items = [(key, encoded(value, f"{where}[{key!r}]")) for key, value in state.items()]
        if _KIND not in state and all(type(key) is str for key in state):
            return dict(items)
        return _tagged("dict", [[encoded(key, f"a key of {where}"), one] for key, one in items])
    if kind in (tuple, set, frozenset):
        return _tagged(
            kind.__name__, [encoded(one, f"{where}[{at}]") for at, one in enumerate(state)]
        )
    if kind in (bytes, bytearray):
        return _tagged(kind.__name__, _text(bytes(state)))
    if isinstance(state, np.generic) and state.dtype.kind in _ARRAYS:
        return _tagged("scalar", [state.dtype.str, _text(state.tobytes())])
    if kind is np.ndarray and state.dtype.kind in _ARRAYS:
        return _tagged("array", [state.dtype.str, list(state.shape), _text(state.tobytes())])
    if kind is Tensor and state.layout is torch.strided and not state.is_quantized:
        return _tagged("tensor", _tensor(state))
    raise TypeError(f"{where} is of type {kind.__module__}.{kind.__qualname__}")


def decoded(found: Any) -> Any:
    """The state that was encoded: of the same types, in memory of its own.

    Raises:
        ValueError: nothing was encoded like that.
    """
    if isinstance(found, list):
        return [decoded(one) for one in found]
    if not isinstance(found, dict):
        return found
    if found.keys() != {_KIND}:
        return {key: decoded(value) for key, value in found.items()}
    kind, value = found[_KIND]
    if kind == "float":
        return float.fromhex(value)
    if kind == "dict":
        return {decoded(key): decoded(one) for key, one in value}
    if kind in _SEVERAL:
        return _SEVERAL[kind](decoded(one) for one in value)
    if kind in _BYTES:
        return _BYTES[kind](base64.b64decode(value))
    if kind == "scalar":
        return np.frombuffer(base64.b64decode(value[1]), _dtype(value[0]))[0]
    if kind == "array":
        flat = np.frombuffer(base64.b64decode(value[2]), _dtype(value[0]))
        return flat.reshape(value[1]).copy()
    if kind == "tensor":
        return _of_tensor(*value)
    raise ValueError(f"a value of kind {kind!r}")


_SEVERAL: Final[dict[str, Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_BYTES: Final[dict[str, Any]] = {"bytes": bytes, "bytearray": bytearray}


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {_KIND: [kind, value]}


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _dtype(text: str) -> np.dtype[Any]:
    found = np.dtype(text)
    if found.kind not in _ARRAYS:
        raise ValueError(f"an array of type {text!r}")
    return found


def _tensor(state: Tensor) -> list[Any]:
    """Type, shape and bytes; on the host again, whatever device it was on."""
    whole = state.detach().cpu().resolve_conj().resolve_neg().contiguous()
    content = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(whole.dtype).removeprefix("torch."), list(whole.shape), _text(content)]


def _of_tensor(name: str, shape: list[int], text: str) -> Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of type {name!r}")
    content = bytearray(base64.b64decode(text))
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)
