"""Values of Python as columns of Arrow."""

import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# What `column_of` raises of values that have no type in common.
UNFIT: Final = (pa.ArrowException, TypeError, ValueError, OverflowError)


def plain(value: Any) -> Any:
    """A value as `column_of` takes it: tensors as arrays, pictures of Pillow's as bytes."""
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a torch tensor
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim and value.dtype == np.float16:
        return value.astype(np.float32)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        return value.item()
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # a picture of Pillow's
        written = io.BytesIO()
        value.save(written, "PNG")
        return written.getvalue()
    return value


def column_of(values: Sequence[Any]) -> pa.Array:
    """A column of them: numbers, strings, bytes, None, lists or arrays.

    Raises:
        pa.ArrowException, TypeError, ValueError, OverflowError: they have no type in common.
    """
    if all(isinstance(value, np.ndarray) for value in values):
        shapes = {value.shape for value in values}
        kinds = {value.dtype for value in values}
        if len(shapes) == len(kinds) == 1 and next(iter(kinds)).kind in "iufb":
            found = pa.array(np.stack(values).reshape(-1))
            for width in reversed(next(iter(shapes))):
                if not width:
                    break
                found = pa.FixedSizeListArray.from_arrays(found, width)
            else:
                return found
    return pa.array([one.tolist() if isinstance(one, np.ndarray) else one for one in values])


def same(one: pa.Array, other: pa.Array) -> bool:
    """Whether two columns have the same values, NaN being one."""
    if one.type != other.type or len(one) != len(other):
        return False
    if pa.types.is_list(one.type) or pa.types.is_fixed_size_list(one.type):
        lengths = pc.list_value_length(one).equals(pc.list_value_length(other))
        return bool(lengths) and same(one.flatten(), other.flatten())
    if pa.types.is_floating(one.type):
        left, right = (np.asarray(column.fill_null(0)) for column in (one, other))
        missing = bool(one.is_null().equals(other.is_null()))
        return missing and np.array_equal(left, right, equal_nan=True)
    return bool(one.equals(other))
