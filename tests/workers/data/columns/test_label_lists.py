"""Labels that are lists: what of them counts, in every format, or an error with the row."""

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from protos.job_pb2 import ColumnSpec, HeadSpec, JobSpec, LabelListSpec
from workers.data import DataError, Dataset
from workers.data.batches import in_order
from workers.data.check import check
from workers.data.columns.arrays import concatenate
from workers.data.columns.labels import labels_of

NAN = float("nan")
ROWS = 30
WORDS = [[1 + i for i in range(row % 5)] for row in range(ROWS)]
TAGS = [[(row + i) % 3 - (i == 1) * 4 for i in range(row % 5)] for row in range(ROWS)]
TOPICS = [[row % 2, 1, 0] for row in range(ROWS)]
RATES = [[row / 4 + i for i in range(row % 4)] for row in range(ROWS)]


def job_of(folder, train):
    job = JobSpec(directory=str(folder))
    job.data.path, job.data.train = ".", train
    job.data.labels.extend(["tags", "topics", "rates"])
    words = ColumnSpec(type="ints", of="words", length=4, keep="last")
    job.data.columns["ids"].CopyFrom(words)
    for name, one in {
        "tags": LabelListSpec(beside="ids"),
        "topics": LabelListSpec(shape=[3]),
        "rates": LabelListSpec(length=2, keep="first", missing="skip"),
    }.items():
        job.data.label_lists[name].CopyFrom(one)
    for name, loss in (("tags", "cross_entropy"), ("topics", "bce_with_logits"), ("rates", "mae")):
        job.train.heads[name].CopyFrom(HeadSpec(loss=loss))
    return job


def columns(**others):
    return {"words": WORDS, "tags": TAGS, "topics": TOPICS, "rates": RATES, **others}


def parquet(folder, table):
    pa.parquet.write_table(table, folder / "a.parquet", row_group_size=7)
    return "a.parquet"


def arrow(folder, table):
    pa.feather.write_feather(table, folder / "a.arrow", chunksize=7)
    return "a.arrow"


def saved(folder, table):
    (folder / "set").mkdir()
    with pa.ipc.new_stream(folder / "set/data.arrow", table.schema) as writer:
        writer.write_table(table, 7)
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (folder / "set/state.json").write_text(json.dumps(state))
    return "set"


def tar(folder, table):
    with tarfile.open(folder / "a.tar", "w") as archive:
        for row, sample in enumerate(table.to_pylist()):
            content = json.dumps(sample).encode()
            info = tarfile.TarInfo(f"{row:04}.json")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return "a.tar"


def source(folder, table):
    rows = table.to_pylist()
    code = f"import numpy as np\nnan = None\nrows = {rows!r}\ndef make(path, name):\n"
    code += "    return [{**r, 'topics': np.array(r['topics'])} for r in rows]\n"
    (folder / "own.py").write_text(code)
    return ""


@pytest.mark.parametrize("write", [parquet, arrow, saved, tar, source])
def test_lists_of_every_format_are_the_same_labels(tmp_path, write):
    rates = [[None if i == 1 and row % 8 == 3 else v for i, v in enumerate(r)] for row, r in
             enumerate(RATES)]  # fmt: skip
    train = write(tmp_path, pa.table(columns(rates=rates)))
    job = job_of(tmp_path, train or "all")
    if write is source:
        job.data.source = "own.py:make"
    if write is tar:
        job.data.columns["ids"].of = "json.words"
        job.data.labels[:] = [f"json.{name}" for name in job.data.labels]
        for name in list(job.data.label_lists):
            job.data.label_lists[f"json.{name}"].CopyFrom(job.data.label_lists.pop(name))
            job.train.heads[name].label = f"json.{name}"
    check(job)
    for options in ({}, {"cache_bytes": 0, "block_rows": 4, "window_rows": 9}):
        dataset = Dataset(job.data, "train", tmp_path, labels=labels_of(job), **options)
        found = concatenate([batch for _, batch in in_order(dataset, 8, 0, 1)])
        name = "label.json." if write is tar else "label."
        ids, tags = found["ids"].tolist(), found[name + "tags"].tolist()
        for row in range(ROWS):
            words, own = WORDS[row][-4:], [max(-1, tag) for tag in TAGS[row][-4:]]
            assert ids[row] == words + [0] * (4 - len(words))
            assert tags[row] == own + [-1] * (4 - len(own))
        assert found[name + "topics"].tolist() == TOPICS
        assert found[name + "tags"].dtype == np.int32
        expected = [[NAN if v is None else v for v in [*r[:2], None, None][:2]] for r in rates]
        np.testing.assert_array_equal(found[name + "rates"], np.array(expected, np.float32))


@pytest.mark.parametrize(
    ("column", "row", "value", "expected"),
    [
        ("topics", 21, [1, 0], r"data\.labels: topics: got 'a list of 2', expected .*\[3\]"),
        ("topics", 21, None, "got 'missing', expected lists of shape"),
        ("topics", 21, [1, 2, 0], "got 2.0, expected 0 or 1 in every list"),
        ("topics", 21, [1, None, 0], "got 'missing', expected 0 or 1 in every list"),
        ("tags", 21, [1, 2], r"got '2 values', expected 1, as words has"),
        ("tags", 19, [1, 2, 0, 2**31], "got 2147483648.0, expected a whole number"),
        ("tags", 19, None, "got 'missing', expected a list in every row"),
        ("tags", 21, [-1.5], "got -1.5, expected a whole number"),
        ("rates", 21, [0.5, 1e39], "got 1e.39, expected a finite number"),
    ],
)
def test_what_does_not_fit_is_named_with_its_row(tmp_path, column, row, value, expected):
    own = [*columns()[column]]
    own[row] = value
    job = job_of(tmp_path, parquet(tmp_path, pa.table(columns(**{column: own}))))
    with pytest.raises(DataError, match=rf"row {row + 1}: .*{expected}"):
        Dataset.of(job, "train").encoded()


@pytest.mark.parametrize("shape", [[4], [2, 2]])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_row_without_a_list_counts_nothing_where_that_is_said(tmp_path, shape, nested, fixed):
    nested = nested and len(shape) > 1
    values = [[[0, 1], [1, None]] if nested else [0, 1, 1, None], None]
    size = 2 if nested else 4
    kind = pa.list_(pa.int64(), size) if fixed else pa.list_(pa.int64())
    kind = pa.list_(kind, *[2] * fixed) if nested else kind
    train = parquet(tmp_path, pa.table({"x": [1.0, 2.0], "y": pa.array(values, kind)}))
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.train, job.data.label = ".", train, "y"
    job.data.dense.append("x")
    job.data.label_lists["y"].CopyFrom(LabelListSpec(shape=shape, missing="skip"))
    found = Dataset.of(job, "train").encoded()["label.label"]
    assert found.shape == (2, *shape)
    np.testing.assert_array_equal(found.reshape(2, 4), [[0, 1, 1, NAN], [NAN] * 4])


def test_lists_of_another_fixed_size_are_named_though_some_are_missing(tmp_path):
    values = pa.array([[0, 1, 1, 0], None], pa.list_(pa.int64(), 4))
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.label = ".", "y"
    job.data.train = parquet(tmp_path, pa.table({"x": [1.0, 2.0], "y": values}))
    job.data.dense.append("x")
    job.data.label_lists["y"].CopyFrom(LabelListSpec(shape=[3], missing="skip"))
    with pytest.raises(DataError, match=r"row 1: data\.label: y: got 'a list of 4'.*\[3\]"):
        check(job)


def test_lists_need_to_be_described_and_text_has_none(tmp_path):
    job = job_of(tmp_path, parquet(tmp_path, pa.table(columns())))
    del job.data.label_lists["topics"]
    with pytest.raises(DataError, match=r"topics: .*expected .*data\.label_lists"):
        check(job)
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    text = JobSpec(directory=str(tmp_path))
    text.data.path, text.data.train, text.data.label = ".", "a.csv", "y"
    text.data.dense.append("x")
    text.data.label_lists["y"].shape.append(1)
    with pytest.raises(DataError, match="expected a column of lists of numbers"):
        check(text)
