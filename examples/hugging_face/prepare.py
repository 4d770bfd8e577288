"""Lines of this Python's own sources as lists of bytes, and a small GPT-2 to begin with."""

import hashlib
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LENGTH = 64  # tokens of a line at most; longer lines are left out
PADDING = 0
_MADE = "2"  # a change here makes the files anew


def prepare(path: str) -> None:
    """Writes train and valid.parquet and the folder `model` into the folder `path`, once.

    A file of the library goes to valid when the first byte of the SHA-256 of its name is below 13
    (5 %). The model stands for pretrained weights: it has its first, random ones.
    """
    folder = Path(path)
    mark = folder / "made"
    if mark.is_file() and mark.read_text() == _MADE:
        return
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))
    for split, valid in (("train", False), ("valid", True)):
        lines = [line for file in files if is_held_out(file) == valid for line in lines_of(file)]
        table = pa.table({"ids": pa.array(lines, pa.list_(pa.int32()))})
        pq.write_table(table, folder / f"{split}.parquet", row_group_size=16384)
    small_model(folder / "model")
    mark.write_text(_MADE)


def is_held_out(file: Path) -> bool:
    """Whether a file's lines are for validation."""
    return hashlib.sha256(file.name.encode()).digest()[0] < 13


def lines_of(file: Path) -> list[list[int]]:
    """The bytes of its lines of at least 8 and at most `LENGTH` bytes."""
    lines = file.read_bytes().splitlines(keepends=True)
    return [list(line) for line in lines if 8 <= len(line) <= LENGTH]


def small_model(folder: Path) -> None:
    """Save a GPT-2 of 0.2 million weights over bytes, its head untied so that it can be cut."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=3,
        n_head=4,
        bos_token_id=10,
        eos_token_id=10,
        pad_token_id=PADDING,
        tie_word_embeddings=False,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
