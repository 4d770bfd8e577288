"""Joins each impression with what its user was shown before: Parquet, a file for each split."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

VERSION = "1"  # a change here makes the files anew
LENGTH = 24  # impressions of a history
SPLITS = ("train", "valid", "test")
FILES = tuple(f"{split}.tsv.gz" for split in SPLITS)
# Known of an impression only afterwards: of earlier ones they are inputs, of its own never.
OUTCOMES = ("is_click", "long_view", "is_like", "is_follow", "is_comment", "is_forward", "is_hate")
HIDDEN = frozenset({*OUTCOMES, "play_time_ms", "time_ms", "date"}) - {"is_click"}


def prepare(path: str) -> None:
    """Writes train, valid and test.parquet into the folder `path`.

    Columns: those of the source but other outcomes and times, and, of the up to LENGTH latest
    impressions of the same user that are earlier in time, the oldest first: `history`, their
    videos; `outcomes`, 1 for seen, 2 clicked on, 3 watched for long, 4 liked; `ages`, whole seconds
    before the impression. Histories go across splits: what was before a test impression is known.

    The source is looked for in that folder, then beside the project.

    Raises:
        RuntimeError: it is in neither place.
    """
    folder = Path(path)
    stamp = folder / "version.txt"
    if stamp.is_file() and stamp.read_text() == VERSION:
        return
    source = find(folder)
    parse = pa.csv.ParseOptions(delimiter="\t", quote_char=False)
    convert = pa.csv.ConvertOptions(strings_can_be_null=True)
    parts = [pa.csv.read_csv(source / name, None, parse, convert) for name in FILES]
    ends = np.cumsum([0, *(part.num_rows for part in parts)])
    table = with_histories(pa.concat_tables(parts, promote_options="permissive").combine_chunks())
    folder.mkdir(parents=True, exist_ok=True)
    for split, (first, end) in zip(SPLITS, pairwise(ends), strict=True):
        unfinished = folder / f".{split}.parquet"
        own = table.slice(int(first), int(end - first))
        pa.parquet.write_table(own, unfinished, compression="zstd")
        os.replace(unfinished, folder / f"{split}.parquet")
    stamp.write_text(VERSION)  # last: without it the files are made anew


def find(folder: Path) -> Path:
    """The folder that has the data."""
    places = [folder, Path(__file__).resolve().parents[3] / "shared/data/kuairand-pure-ctr"]
    for place in places:
        if all((place / name).is_file() for name in FILES):
            return place
    raise RuntimeError(f"data.prepare: expected {', '.join(FILES)} in {folder}")


def with_histories(table: pa.Table) -> pa.Table:
    """The rows in their order, with the columns of their histories in place of what is hidden."""
    users, times = (np.asarray(table[name]) for name in ("user_id", "time_ms"))
    order = np.lexsort((times, users))
    firsts, ends = spans(users[order], times[order])
    # Of each row in the order of the table: which of the ordered rows it may know.
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    firsts, ends = firsts[place], ends[place]
    lengths = ends - firsts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    known = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - firsts, lengths)
    earlier = order[known]
    ages = (np.repeat(times, lengths) - times[earlier]) // 1000
    lists = {
        "history": np.asarray(table["video_id"])[earlier],
        "outcomes": outcome(table)[earlier],
        "ages": ages,
    }
    starts = pa.array(offsets, pa.int32())
    for name, values in lists.items():
        table = table.append_column(name, pa.ListArray.from_arrays(starts, pa.array(values)))
    return table.select([name for name in table.column_names if name not in HIDDEN])


def spans(
    users: npt.NDArray[np.int64], times: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of rows by user, then time: the first and the end of those that each may know.

    Those at its own moment it may not.
    """
    rows = np.arange(len(users))
    starts = np.append(True, users[1:] != users[:-1])
    moments = starts | np.append(True, times[1:] != times[:-1])
    first_of_user = np.maximum.accumulate(np.where(starts, rows, 0))
    ends = np.maximum.accumulate(np.where(moments, rows, 0))
    return np.maximum(first_of_user, ends - LENGTH), ends


def outcome(table: pa.Table) -> npt.NDArray[np.int64]:
    """What came of each impression: the most that did."""
    clicked, long, liked = (np.asarray(table[name]) for name in OUTCOMES[:3])
    found: npt.NDArray[np.int64] = np.select([liked == 1, long == 1, clicked == 1], [4, 3, 2], 1)
    return found
