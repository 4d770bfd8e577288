"""Keys and gradients from a caller, checked and laid out for the engine."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ps.errors import NonFiniteError, TableError

Keys = NDArray[np.uint64]
Floats = NDArray[np.float32]
FLOAT16_END = 65504.0  # what is beyond is carried as this


def as_keys(keys: Any) -> tuple[Keys, tuple[int, ...]]:
    """Flat contiguous uint64 keys, and the shape they came in.

    Args:
        keys: NumPy or torch integers of any shape. int64 keeps its bits: -1 is 2**64 - 1.

    Raises:
        TableError: they are not integers.
    """
    array = _to_numpy(keys)
    if array.size == 0:
        return np.empty(0, np.uint64), array.shape
    if array.dtype.kind not in "iu":
        raise TableError(f"keys: dtype {array.dtype}; expected integers (int64 or uint64)")
    if array.dtype.kind == "i":
        wide = np.ascontiguousarray(array, dtype="<i8").view(np.uint64)
    else:
        wide = np.ascontiguousarray(array, dtype="<u8")
    return wide.reshape(-1), array.shape


def as_gradients(grads: Any, shape: tuple[int, ...], dim: int) -> Floats:
    """Contiguous float32 [n, dim] for keys of `shape` (n of them).

    Raises:
        TableError: they are not floats, or not one row of `dim` a key.
    """
    array = _to_numpy(grads)
    if array.dtype.kind != "f":
        raise TableError(f"gradients: dtype {array.dtype}; expected floats (float32)")
    count = int(np.prod(shape, dtype=np.int64))
    if array.shape not in ((*shape, dim), (count, dim)):
        raise TableError(
            f"gradients: shape {list(array.shape)}; expected {[*shape, dim]}: a row of {dim} "
            f"for each of the {count} keys"
        )
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes infinite and is refused
        return np.ascontiguousarray(array, dtype="<f4").reshape(count, dim)


def check_range(table: str, keys: Keys, values: Floats, wire: str) -> None:
    """Refuse values that a wire of float16 would change to its largest one.

    Args:
        table: for errors.
        keys: uint64 [n].
        values: float32 [n, dim].
        wire: how they travel; nothing is refused of others than float16.

    Raises:
        TableError: naming the first such key.
        NonFiniteError: it is infinite there.
    """
    if wire != "float16" or values.size == 0:
        return
    if not max(values.max(), -values.min()) >= FLOAT16_END:  # NaN is carried, to be found there
        return
    at = int(np.argmax((np.abs(values) >= FLOAT16_END).any(axis=1)))
    worst = values[at][np.abs(values[at]).argmax()]
    kind = TableError if np.isfinite(worst) else NonFiniteError
    raise kind(
        f"table {table!r}, key {keys[at]}: {worst:g}, which wire='float16' cannot carry; expected "
        f"values below {FLOAT16_END:g}, or wire='bfloat16' or 'float32'"
    )


def _to_numpy(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a torch tensor, without importing torch
        values = values.detach()
        if values.is_floating_point():
            values = values.float()  # NumPy has no bfloat16
        values = values.cpu().numpy()
    array: NDArray[Any] = np.asarray(values)
    return array
