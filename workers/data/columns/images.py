"""Pictures as bytes of their channels: decoded by Pillow, of one size."""

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from workers.data.errors import DataError

RESIZE, CROP = "resize", "crop"
_MODES: Final = {1: "L", 3: "RGB", 4: "RGBA"}
_DEEP: Final = ("I", "F")  # begin the modes of more than 8 bits a channel
_EXPECTED: Final = "a column of pictures: bytes, paths, or both as datasets keeps them"
Pixels = npt.NDArray[np.uint8]


def is_image(kind: pa.DataType) -> bool:
    """Whether a column of that type may have pictures."""
    types = pa.types
    if types.is_struct(kind):
        return {"bytes", "path"} <= {field.name for field in kind}
    if types.is_dictionary(kind):
        kind = kind.value_type
    texts = types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)
    return bool(texts or types.is_binary(kind) or types.is_large_binary(kind))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A picture as it is in a file.

    Args:
        name: of its own, if it has one.
    """

    content: bytes | Path
    name: str


@dataclass(frozen=True, slots=True)
class Images:
    """What pictures become.

    Args:
        shape: channels (1: grey, 3: RGB, 4: RGBA), height, width.
        fit: how one of another size becomes so large: resize, or crop, which keeps its proportions
            and cuts what is too much off both sides; empty: it is an error.
    """

    shape: tuple[int, ...]
    fit: str

    def decode(self, column: pa.Array, key: str, path: Path, first: int) -> Pixels:
        """uint8 `[n, C, H, W]`.

        Args:
            key: of the job file; `path` and `first`, rows before these, are for errors, and
                pictures named by a path are in the folder of `path`.

        Raises:
            DataError: one is missing, damaged, or of another size or depth; or Pillow is.
        """
        found = np.zeros((len(column), *self.shape), np.uint8)

        def place(at: int, stored: _Stored | None) -> None:
            found[at] = self._pixels(stored, key, path, first + at)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(place, range(len(column)), _stored(column, path.parent)):
                pass
        return found

    def _pixels(self, stored: _Stored | None, key: str, path: Path, row: int) -> Pixels:
        try:
            from PIL import Image, ImageOps
        except ImportError:
            expected = "Pillow, which is not installed: `pip install 'heterps[images]'`"
            raise DataError("job", key, "image", expected) from None
        if stored is None:
            raise DataError(str(path), key, "missing", "a picture in every row", row)
        channels, height, width = self.shape
        shown = f"{stored.name}: " if stored.name else ""
        try:
            content = stored.content
            if isinstance(content, Path):
                content = content.read_bytes()
            with Image.open(io.BytesIO(content)) as opened:
                if opened.mode.startswith(_DEEP):
                    expected = "a picture of 8 bits a channel"
                    raise DataError(str(path), key, f"{shown}mode {opened.mode}", expected, row)
                picture = ImageOps.exif_transpose(opened).convert(_MODES[channels])
        except (DataError, MemoryError):
            raise
        except Exception as error:  # Pillow's decoders have errors of their own
            text = f"{shown}{type(error).__name__}: {error}"
            raise DataError(str(path), key, text, "a whole picture", row) from error
        if picture.size != (width, height):
            if not self.fit:
                got = f"{shown}{picture.height} x {picture.width}"
                expected = f"{height} x {width} pixels, or fit: resize, or crop"
                raise DataError(str(path), key, got, expected, row)
            fitted = ImageOps.fit if self.fit == CROP else _resized
            picture = fitted(picture, (width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(picture)
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def check(kind: pa.DataType, key: str, path: Path) -> None:
    """Raises `DataError` unless a column of that type may have pictures."""
    if not is_image(kind):
        raise DataError(str(path), key, str(kind), _EXPECTED)


def _resized(picture: Any, size: tuple[int, int], method: Any) -> Any:
    return picture.resize(size, method)


def _stored(column: pa.Array, folder: Path) -> Iterator[_Stored | None]:
    for value in column:
        one = value.as_py()
        if isinstance(one, dict):
            name = one["path"] or ""
            one = one["bytes"] if one["bytes"] is not None else one["path"]
        else:
            name = one if isinstance(one, str) else ""
        if isinstance(one, str):
            yield _Stored(folder / one, name)
        else:
            yield None if one is None else _Stored(one, name)
