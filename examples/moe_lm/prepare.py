"""Cuts texts into windows of bytes: this Python's own sources, or Tiny Shakespeare."""

import hashlib
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

VERSION = "1"  # a change here makes the files anew
CONTEXT = 64  # tokens that a prediction may see; a window has one more
OVERLAP = 4  # Shakespeare's training windows begin CONTEXT / OVERLAP apart
ROW_GROUP_ROWS = 16384
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

Bytes = npt.NDArray[np.uint8]


def sources(path: str) -> None:
    """Writes train and valid.parquet of the standard library's .py files into the folder `path`.

    A file goes to valid when the first byte of the SHA-256 of its path in the library is below 13
    (5 %), so which is which does not depend on the machine. Packages installed beside the library
    are left out, and so are its tests and idlelib.
    """
    made_of = f"{VERSION} sources {platform.python_version()}"
    if not _is_made(Path(path), made_of):
        write(Path(path), made_of, (library(valid=False), library(valid=True)), CONTEXT)


def shakespeare(path: str) -> None:
    """Writes train and valid.parquet of Tiny Shakespeare into the folder `path`.

    The text, `input.txt`, is looked for in that folder, then beside the project. The first 90 % are
    for training and the rest is valid, the customary split.

    Raises:
        RuntimeError: it is in neither place, or is another text.
    """
    made_of = f"{VERSION} shakespeare"
    if not _is_made(Path(path), made_of):
        text = find_shakespeare(Path(path))
        cut = len(text) * 9 // 10
        write(Path(path), made_of, (text[:cut], text[cut:]), CONTEXT // OVERLAP)


def find_shakespeare(folder: Path) -> Bytes:
    """The text as bytes [1115394]."""
    places = [folder, Path(__file__).resolve().parents[3] / "shared/data/text-tinyshakespeare"]
    for place in places:
        file = place / "input.txt"
        if file.is_file():
            text = file.read_bytes()
            if hashlib.sha256(text).hexdigest() != SHAKESPEARE_SHA256:
                raise RuntimeError(
                    f"data.prepare: {file}: expected the text of SHA-256 {SHAKESPEARE_SHA256}"
                )
            return np.frombuffer(text, np.uint8)
    raise RuntimeError(
        f"data.prepare: no {folder / 'input.txt'}, expected Tiny Shakespeare there: "
        "data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn"
    )


def library(valid: bool) -> Bytes:
    """The sources, each file ended by a zero byte."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    texts = []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if left_out & set(name.parts):
            continue
        if (hashlib.sha256(name.as_posix().encode()).digest()[0] < 13) == valid:
            texts.append(np.frombuffer(file.read_bytes() + b"\0", np.uint8))
    return np.concatenate(texts)


def windows(text: Bytes, context: int, step: int) -> Bytes:
    """[n, context + 1]: windows of a text, `step` apart; what is left at its end is left out."""
    return np.lib.stride_tricks.sliding_window_view(text, context + 1)[::step]


def write(folder: Path, made_of: str, texts: tuple[Bytes, Bytes], step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for split, of_split, apart in zip(("train", "valid"), texts, (step, CONTEXT), strict=True):
        rows = windows(of_split, CONTEXT, apart)
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), CONTEXT + 1)
        unfinished = folder / f".{split}.parquet"
        pa.parquet.write_table(
            pa.table({"window": column}),
            unfinished,
            row_group_size=ROW_GROUP_ROWS,
            compression="zstd",
        )
        os.replace(unfinished, folder / f"{split}.parquet")
        print(f"{split}: {len(rows)} windows of {CONTEXT + 1} bytes")
    (folder / "version.txt").write_text(made_of)  # last: without it the files are made anew


def _is_made(folder: Path, made_of: str) -> bool:
    stamp = folder / "version.txt"
    return stamp.is_file() and stamp.read_text() == made_of
