"""Turns the emoji's pictures and captions into Parquet, a file for each split."""

import csv
import gzip
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

VERSION = "1"  # a change here makes the files anew
PIXELS = 32 * 32 * 3
SPLITS = ("train", "valid", "test")


def prepare(path: str) -> None:
    """Writes train, valid and test.parquet into the folder `path`.

    Columns: `pixels`, PIXELS numbers from 0 to 255; `words`, those of the caption, each once;
    `base`, the number of the emoji without its skin tone; `variant`, 1 where it has one.

    `captions.tsv.gz` and `rgb32.u8.gz` are looked for in that folder, then beside the project.

    Raises:
        RuntimeError: they are in neither place, or do not go together.
    """
    folder = Path(path)
    stamp = folder / "version.txt"
    if stamp.is_file() and stamp.read_text() == VERSION:
        return
    source = find(folder)
    with gzip.open(source / "captions.tsv.gz", "rt", encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream, delimiter="\t"))
    with gzip.open(source / "rgb32.u8.gz") as stream:
        pixels = np.frombuffer(stream.read(), np.uint8)
    if len(pixels) != len(rows) * PIXELS:
        raise RuntimeError(
            f"data.prepare: {source / 'rgb32.u8.gz'}: {len(pixels)} bytes; expected {PIXELS} for "
            f"each of {len(rows)} captions"
        )
    pixels = pixels.reshape(-1, PIXELS)
    bases = {base: number for number, base in enumerate(sorted({row["base"] for row in rows}))}
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        some = [row for row in rows if row["split"] == split]
        own = pixels[[int(row["id"]) for row in some]]
        table = pa.table(
            {
                "pixels": pa.FixedSizeListArray.from_arrays(pa.array(own.reshape(-1)), PIXELS),
                "words": [words(row["caption"]) for row in some],
                "base": pa.array([bases[row["base"]] for row in some], pa.int32()),
                "variant": pa.array([int(row["is_variant"]) for row in some], pa.int32()),
            }
        )
        unfinished = folder / f".{split}.parquet"
        pa.parquet.write_table(table, unfinished, compression="zstd")
        os.replace(unfinished, folder / f"{split}.parquet")
        print(f"{split}: {len(some)} pictures")
    stamp.write_text(VERSION)  # last: without it the files are made anew


def find(folder: Path) -> Path:
    """The folder that has the data."""
    places = [folder, Path(__file__).resolve().parents[3] / "shared/data/emoji-image-text"]
    for place in places:
        if (place / "captions.tsv.gz").is_file() and (place / "rgb32.u8.gz").is_file():
            return place
    raise RuntimeError(
        f"data.prepare: no captions.tsv.gz and rgb32.u8.gz in {folder}; expected the captions and "
        "the pictures there"
    )


def words(caption: str) -> list[str]:
    """The words of a caption, each once, in their order."""
    return list(dict.fromkeys(re.findall(r"[\w'’-]+", caption.lower())))
