"""Makes data of Criteo's shape: 13 numbers, 26 keys, a click, none of it real.

Cardinalities are those of the Criteo Kaggle set, no larger than the published models' hash space;
keys are drawn by a power law, those of one sample alike in a hidden interest, and clicks from a
hidden linear model of them.
"""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

VERSION = "1"  # a change here makes the files anew
HASH_SPACE = 1_000_001
CARDINALITIES = (1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194)
CARDINALITIES += (27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572)
DENSE = 13
ROWS = {"train": 60_000, "valid": 10_000, "test": 10_000}
CLICK_RATE = 0.25
SKEW = 1.2  # of the power law
INTERESTS = 16


def prepare(path: str) -> None:
    """Writes train, valid and test Parquet files into the folder `path`, all or none.

    Does nothing when they are there and made by this version.

    Raises:
        RuntimeError: the folder holds files of somebody else.
    """
    folder = Path(path)
    stamp = folder / "version.txt"
    complete = all((folder / f"{split}.parquet").is_file() for split in ROWS)
    if complete and stamp.is_file() and stamp.read_text() == VERSION:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unfinished.chmod(0o755)
        table = clicks(sum(ROWS.values()), seed=0)
        first = 0
        for split, rows in ROWS.items():
            pa.parquet.write_table(table.slice(first, rows), unfinished / f"{split}.parquet")
            first += rows
        (unfinished / stamp.name).write_text(VERSION)
        _replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def clicks(rows: int, seed: int) -> pa.Table:
    """`label`, `I1` .. `I13` float32 and `C1` .. `C26` int64 of so many samples."""
    rng = np.random.default_rng(seed)
    numbers = rng.gamma(0.5, 0.4, (DENSE, rows)).astype(np.float32)
    logits = 0.5 * (numbers.T @ rng.normal(size=DENSE))
    interest = rng.integers(0, INTERESTS, rows)
    keys: dict[str, npt.NDArray[np.int64]] = {}
    for slot, cardinality in enumerate(CARDINALITIES, 1):
        size = min(cardinality, HASH_SPACE)
        ranks = _power_law(rng, -(-size // INTERESTS), rows)
        keys[f"C{slot}"] = (ranks * INTERESTS + interest) % size
        logits = logits + 0.4 * rng.normal(size=size)[keys[f"C{slot}"]]
    logits += np.log(CLICK_RATE / (1 - CLICK_RATE)) - logits.mean()
    label = rng.random(rows) < 1 / (1 + np.exp(-logits))
    dense = {f"I{n}": values for n, values in enumerate(numbers, 1)}
    return pa.table({"label": label.astype(np.int8), **dense, **keys})


def _power_law(rng: np.random.Generator, size: int, count: int) -> npt.NDArray[np.int64]:
    """Ranks below `size` whose chance falls as rank to the power -`SKEW`, by inversion."""
    most = (1.0 + size) ** (1 - SKEW)
    ranks = (1 - rng.random(count) * (1 - most)) ** (1 / (1 - SKEW))
    return np.minimum(ranks.astype(np.int64) - 1, size - 1)


def _replace(new: Path, folder: Path) -> None:
    """Renames `new` to `folder`; an older version there is removed, other files are not."""
    if folder.exists():
        ours = {f"{split}.parquet" for split in ROWS} | {"version.txt"}
        others = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
        if others:
            raise RuntimeError(
                f"{folder}: data.path: holds {others[0]!r}, expected an absent or empty folder, "
                "or one made by this example"
            )
        shutil.rmtree(folder)
    os.rename(new, folder)
