"""Arrow's files and the folders that `datasets` saves: the rows of the same Parquet file."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from protos.job_pb2 import ColumnSpec, JobSpec
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.batches import in_order
from workers.data.check import check
from workers.data.columns.arrays import concatenate

ROWS = 700


def table():
    row = np.arange(ROWS)
    return pa.table(
        {
            "row": row,
            "y": (row % 3 == 0).astype(np.int8),
            "word": pa.array([None if r % 11 == 0 else f"w{r % 17}" for r in row]),
            "gap": pa.array([None if r % 4 == 0 else r / 4 for r in row]),
            "ids": pa.array([None if r % 9 == 0 else list(range(r % 6)) for r in row]),
        }
    )


@pytest.fixture
def job(tmp_path):
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.label = ".", "y"
    job.data.dense.extend(["row", "gap"])
    job.data.sparse.extend(["word", "word*row"])
    ids = ColumnSpec(of="ids", type="ints", length=4, keep="last")
    job.data.columns["ids"].CopyFrom(ids)
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=150)
    return job


def write_stream(path, rows, size, options=None):
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, rows.schema, options=options) as stream,
    ):
        stream.write_table(rows, size)


def write_saved(folder, rows, shards=3, **state):
    """What `datasets` writes by `save_to_disk`."""
    folder.mkdir(parents=True)
    size = -(-rows.num_rows // shards)
    names = [f"data-{part:05d}-of-{shards:05d}.arrow" for part in range(shards)]
    for part, name in enumerate(names):
        write_stream(folder / name, rows.slice(part * size, size), 100)
    write_stream(folder / "cache-1a2b.arrow", rows, 100)  # what it leaves there besides
    told = {"_data_files": [{"filename": name} for name in names], "_split": "train"} | state
    (folder / "state.json").write_text(json.dumps(told))
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return folder


def encoded(kind):
    """The same values as another type: as dictionaries, as views."""
    rows = table()
    if kind == "views":
        views = rows["word"].cast(pa.string_view())
        return rows.set_column(2, "word", views)
    return rows.set_column(2, "word", rows["word"].dictionary_encode())


def write(folder, kind):
    feather = pa.feather.write_feather
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    writers = {
        "a.feather": lambda at: feather(table(), at, compression="zstd", chunksize=130),
        "b.feather": lambda at: feather(table(), at, compression="uncompressed"),
        "c.feather": lambda at: feather(encoded("dictionary"), at, chunksize=90),
        "a.arrow": lambda at: write_stream(at, table(), 110),
        "b.arrow": lambda at: write_stream(at, table(), 110, options),
        "c.arrow": lambda at: write_stream(at, encoded("dictionary"), 110),
        "d.arrow": lambda at: write_stream(at, encoded("views"), 110),
        "saved": lambda at: write_saved(at, table()),
        "both/train": lambda at: write_saved(at, table(), 1),
    }
    writers[kind](folder / kind)


KINDS = [f"{n}.{e}" for e in ("feather", "arrow") for n in "abcd" if (n, e) != ("d", "feather")]
SPLIT = {"cache_bytes": 0, "block_rows": 64, "window_rows": 100}


def whole(job, train, **options):
    job.data.train = train
    check(job)
    dataset = Dataset(job.data, "train", job.directory, **options)
    assert dataset.rows == ROWS
    return concatenate([batch for _, batch in in_order(dataset, 300, 0, 1)])


@pytest.mark.parametrize("kind", [*KINDS, "saved", "both/train"])
@pytest.mark.parametrize("options", [{}, SPLIT])
def test_rows_are_those_of_parquet(job, tmp_path, kind, options):
    (tmp_path / "both").mkdir()
    write(tmp_path, kind)
    expected, found = whole(job, "a.parquet"), whole(job, kind, **options)
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("kind", ["a.feather", "c.arrow", "saved"])
def test_an_epoch_has_each_row_once(job, tmp_path, kind):
    write(tmp_path, kind)
    job.data.train = kind
    batches = GlobalBatches(Dataset(job.data, "train", tmp_path, **SPLIT), 64, seed=3)
    rows = [batches.read(step)["dense"][:, 0] for step in range(batches.steps)]
    assert sorted(np.concatenate(rows).astype(int)) == list(range(ROWS))


def test_tensors_of_a_fixed_shape_are_their_values(job, tmp_path):
    values = np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3)
    rows = table().append_column("t", pa.FixedShapeTensorArray.from_numpy_ndarray(values))
    pa.feather.write_feather(rows, tmp_path / "a.feather")
    job.data.columns["t"].CopyFrom(ColumnSpec(type="floats", length=6))
    np.testing.assert_array_equal(whole(job, "a.feather")["t"], values.reshape(ROWS, 6))


def cut(path, count):
    path.write_bytes(path.read_bytes()[:count])


def last_batch(path):
    """Where the last batch of a stream begins."""
    starts = []
    with pa.memory_map(str(path)) as file:
        while file.tell() < file.size() - 8:
            starts.append(file.tell())
            pa.ipc.read_message(file)
    return starts[-1]


@pytest.mark.parametrize(
    ("kind", "damage", "expected"),
    [
        ("a.feather", lambda path: cut(path, -20), r"a\.feather: contents"),
        ("a.arrow", lambda path: cut(path, -500), r"a\.arrow: contents.*cut short"),
        ("a.arrow", lambda path: cut(path, last_batch(path)), r"a\.arrow: contents.*cut short"),
        ("a.arrow", lambda path: cut(path, 0), r"a\.arrow: contents"),
        ("c.arrow", lambda path: cut(path, -8), r"c\.arrow: contents.*cut short"),
        (
            "a.arrow",
            lambda path: path.write_bytes(path.read_bytes() * 2),
            r"a\.arrow: contents.*bytes follow the end of the stream",
        ),
        (
            "c.arrow",
            lambda path: path.write_bytes(path.read_bytes() * 2),
            r"c\.arrow: contents.*bytes follow the end of the stream",
        ),
        ("b.feather", lambda path: path.write_bytes(b"nothing of it"), r"b\.feather: contents"),
    ],
)
def test_what_is_damaged_is_found_before_training(job, tmp_path, kind, damage, expected):
    write(tmp_path, kind)
    damage(tmp_path / kind)
    job.data.train = kind
    with pytest.raises(DataError, match=expected):
        check(job)


@pytest.mark.parametrize(
    ("train", "state", "expected"),
    [
        ("saved", {"_data_files": [{"filename": "gone.arrow"}]}, "got 'gone.arrow'"),
        ("saved", {"_indices_data_files": [{"filename": "i.arrow"}]}, "as save_to_disk writes"),
        ("saved", {"_data_files": 3}, "got 3"),
        ("both", {}, "one of the splits in it, such as both/train"),
    ],
)
def test_a_saved_folder_is_what_its_state_says(job, tmp_path, train, state, expected):
    write_saved(tmp_path / "saved", table(), **state)
    write_saved(tmp_path / "both" / "train", table())
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    job.data.train = train
    with pytest.raises(DataError, match=expected):
        check(job)


def test_two_columns_of_one_name_are_refused(job, tmp_path):
    rows = table().append_column("gap", table()["row"])
    write_stream(tmp_path / "a.arrow", rows, 100)
    job.data.train = "a.arrow"
    with pytest.raises(DataError, match="two columns are called gap"):
        check(job)
