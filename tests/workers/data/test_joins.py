"""Other files joined by key and by time: what a loop over all rows finds, and never a later row."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.job_pb2 import JobSpec, JoinSpec
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.batches import in_order
from workers.data.check import check
from workers.data.columns.arrays import concatenate

NAN = float("nan")


def write(folder, name, table, groups=7):
    if name.endswith("csv"):
        pa.csv.write_csv(table, folder / name)
    else:
        pq.write_table(table, folder / name, row_group_size=groups)


def job_of(folder, join, dense, train="a.parquet"):
    job = JobSpec(directory=str(folder))
    job.data.path, job.data.train, job.data.label = ".", train, "y"
    job.data.dense.extend(dense)
    for name, spec in join.items():
        job.data.join[name].CopyFrom(spec)
    return job


def read(job, **options):
    check(job)
    dataset = Dataset(job.data, "train", job.directory, **options)
    batches = [dataset.nothing, *(batch for _, batch in in_order(dataset, 11, 0, 1))]
    return concatenate(batches)["dense"]


def brute(rows, others, timed):
    """The value of the other row for each, by its definition; 0 where there is none."""
    found = []
    for key, when in rows:
        fits = [
            (other_when, at, value)
            for at, (other_key, other_when, value) in enumerate(others)
            if key is not None and other_key == key and (not timed or other_when <= when)
        ]
        found.append(max(fits)[2] if fits else 0)
    return found


KEYS = st.one_of(st.none(), st.integers(0, 4))
WHEN = st.integers(-3, 6)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(KEYS, WHEN), min_size=1, max_size=25),
    others=st.lists(st.tuples(KEYS, WHEN), max_size=25),
    timed=st.booleans(),
    kinds=st.tuples(st.sampled_from(["parquet", "csv"]), st.sampled_from(["parquet", "csv"])),
    moments=st.booleans(),
    streamed=st.booleans(),
)
def test_what_is_joined_is_what_a_loop_finds(
    tmp_path, rows, others, timed, kinds, moments, streamed
):
    if not timed:  # a key once
        others = list({key: (key, when) for key, when in others}.values())
    others = [(key, when, at + 1) for at, (key, when) in enumerate(others)]
    start = datetime.datetime(2020, 1, 1)

    def times(values):
        moved = [start + datetime.timedelta(microseconds=v) for v in values] if moments else values
        return pa.array(moved, pa.timestamp("us") if moments else pa.int64())

    own = {
        "row": range(len(rows)),
        "y": [0] * len(rows),
        "k": pa.array([key for key, _ in rows], pa.int64()),
        "t": times([when for _, when in rows]),
    }
    other = {
        "key": pa.array([key for key, _, _ in others], pa.int64()),
        "at": times([when for _, when, _ in others]),
        "value": pa.array([value for _, _, value in others], pa.int64()),
    }
    for name in tmp_path.iterdir():
        name.unlink()
    write(tmp_path, f"a.{kinds[0]}", pa.table({n: pa.array(v) for n, v in own.items()}))
    write(tmp_path, f"b.{kinds[1]}", pa.table(other))
    spec = JoinSpec(file=f"b.{kinds[1]}", by=["k=key"], time="t=at" if timed else "")
    job = job_of(tmp_path, {"b": spec}, ["row", "b.value"], f"a.{kinds[0]}")
    options = {"cache_bytes": 0, "block_rows": 4, "window_rows": 6} if streamed else {}
    if not {key for key, _, _ in others} & {key for key, _ in rows} - {None}:
        told = rf"data\.join\.b: got .*of {len(rows)} rows none has one"
        with pytest.raises(DataError, match=told):
            check(job)
        return
    found = read(job, **options)
    assert found[:, 0].tolist() == list(range(len(rows)))
    assert found[:, 1].tolist() == brute(rows, others, timed)
    batches = GlobalBatches(Dataset(job.data, "train", tmp_path, **options), 3, seed=1)
    seen = np.concatenate([batches.read(step)["dense"] for step in range(batches.steps)])
    order = np.argsort(seen[:, 0])
    np.testing.assert_array_equal(seen[order], found)


def test_fractions_meet_whole_numbers_that_float64_has(tmp_path):
    write(tmp_path, "a.parquet", pa.table({"y": [0], "k": [1], "t": [2**60]}))
    write(tmp_path, "b.parquet", pa.table({"k": [1], "t": [0.5], "v": [1]}))
    job = job_of(tmp_path, {"b": JoinSpec(file="b.parquet", by=["k"], time="t")}, ["b.v"])
    with pytest.raises(DataError, match=r"a\.parquet, row 1.*up to 2\^53"):
        read(job)


def days(*values):
    return pa.array([datetime.date(2020, 1, one) for one in values])


def moments(*values, zone=None, unit="ns"):
    return pa.array(values, pa.timestamp(unit, zone))


TIMES = [
    (pa.array([5, 6]), pa.array([5.5, 4.5]), [2, 1]),
    (pa.array([5.5, 4.0]), pa.array([5, 4]), [1, 2]),
    (pa.array([2**60 + 1, 2**60]), pa.array([2**60, 2**60 + 1]), [2, 1]),
    (days(5, 6), days(6, 5), [2, 1]),
    (moments(10**9 + 5, 10**9), moments(1, 0, unit="s"), [1, 1]),
    (moments(1, 2, unit="s"), moments(10**9 + 1, 10**9), [2, 1]),
    (moments(7, 8, zone="UTC"), moments(8, 7, zone="Europe/Berlin"), [2, 1]),
    (pa.array([1e300, -1e300]), pa.array([-1e301, -1e300]), [2, 2]),
]


@pytest.mark.parametrize(("own", "other", "expected"), TIMES)
def test_times_are_compared_as_they_are(tmp_path, own, other, expected):
    """Also between units, and where float64 would make two one."""
    write(tmp_path, "a.parquet", pa.table({"y": [0, 1], "k": ["u", "u"], "t": own}))
    write(tmp_path, "b.parquet", pa.table({"k": ["u", "u"], "t": other, "v": [1, 2]}))
    job = job_of(tmp_path, {"b": JoinSpec(file="b.parquet", by=["k"], time="t")}, ["b.v"])
    assert read(job)[:, 0].tolist() == expected


@pytest.fixture
def folder(tmp_path):
    table = {
        "y": [0, 1, 1],
        "k": [3, 1, None],
        "s": ["1", "3", "2"],
        "t": [1, 2, 3],
        "b": [True] * 3,
    }
    write(tmp_path, "a.parquet", pa.table(table))
    write(
        tmp_path, "side.parquet", pa.table({"k": [1, 3, None], "t": [1, 1, 1], "v": [7.5, NAN, 9]})
    )
    return tmp_path


def test_keys_are_known_by_their_text_and_joins_stand_beside_each_other(folder):
    write(folder, "part-0.csv", pa.table({"k": ["3", "1"], "v": [30, 10], "word": ["c", "a"]}))
    write(folder, "both.csv", pa.table({"k": [3, 1], "v": ["1", "9"], "w": [5, 6]}))
    write(folder, "part-1.csv", pa.table({"k": ["2"], "v": [20], "word": ["b"]}))
    joins = {
        "one": JoinSpec(file="side.parquet", by=["k"]),
        "text": JoinSpec(file="part-*.csv", by=["s=k"]),
        "both": JoinSpec(file="both.csv", by=["k", "s=v"]),
        "all": JoinSpec(file="side.parquet", time="t"),
    }
    job = job_of(folder, joins, ["one.v", "text.v", "both.w", "all.v"])
    job.data.sparse.extend(["text.word", "text.word*t"])
    found = read(job)
    assert found[:, 0].tolist() == [0, 7.5, 0]
    assert found[:, 1].tolist() == [10, 30, 20]
    assert found[:, 2].tolist() == [5, 0, 0]
    assert found[:, 3].tolist() == [9, 9, 9]


SIDE = {"k": [1, 3], "t": [1, 1], "v": [1, 2]}


@pytest.mark.parametrize(
    ("join", "side", "expected"),
    [
        ({"by": ["k"]}, SIDE | {"k": [3, 3]}, r"b\.parquet, row 2: data\.join\.b: k.*\[3\] a sec"),
        ({"by": ["kk=k"]}, SIDE, r"a\.parquet: data\.join\.b: got 'kk'.*mean 'k'"),
        ({"by": ["k=kk"]}, SIDE, r"b\.parquet: data\.join\.b: got 'kk'"),
        ({"by": ["k"], "time": "when=t"}, SIDE, r"a\.parquet: data\.join\.b: got 'when'"),
        ({"by": ["k"], "time": "t"}, SIDE | {"t": [1, None]}, r"b\.parquet, row 2.*missing"),
        ({"by": ["k"], "time": "t"}, SIDE | {"t": [1, NAN]}, r"b\.parquet, row 2.*got nan"),
        ({"by": ["k"], "time": "t"}, SIDE | {"t": [0.5, float("inf")]}, r"row 2.*got inf"),
        ({"by": ["k"], "time": "t"}, SIDE | {"t": days(1, 2)}, r"a\.parquet.*numbers.*dates"),
        ({"by": ["k"], "time": "t"}, SIDE | {"t": [True, True]}, r"b\.parquet.*bool"),
        ({"by": ["k"], "time": "k=t"}, SIDE, r"a\.parquet, row 3: data\.join\.b: k: got 'missing'"),
        ({"by": ["b=k"]}, SIDE, r"a\.parquet: data\.join\.b: b: got 'bool, and int64"),
        ({"by": ["k"]}, SIDE | {"k": days(1, 2)}, r"int64, and date32"),
        ({"by": ["k"]}, SIDE | {"k": [[1], [2]]}, r"int64, and list"),
        ({"by": ["k"]}, {"k": [1, 3], "w": [1, 2]}, r"data\.dense: got 'b\.v'.*columns are"),
        ({"by": ["k"]}, SIDE | {"v": ["x", "y"]}, r"data\.dense: b\.v: got 'string'"),
    ],
)
def test_what_cannot_be_joined_is_named(folder, join, side, expected):
    write(folder, "b.parquet", pa.table(side))
    pq.write_table(pq.read_table(folder / "a.parquet").drop_columns(["b"]), folder / "c.parquet")
    train = "a.parquet" if "b=k" in join["by"] else "c.parquet"
    job = job_of(folder, {"b": JoinSpec(file="b.parquet", **join)}, ["b.v"], train)
    if "b=k" in join["by"]:
        job = job_of(folder, {"j": JoinSpec(file="b.parquet", **join)}, ["j.v"])
        expected = expected.replace(r"join\.b", r"join\.j")
    with pytest.raises(DataError, match=expected.replace(r"a\.parquet", r"[ac]\.parquet")):
        read(job)


def test_a_join_is_called_as_no_column_and_its_files_are_alike(folder):
    job = job_of(folder, {"t": JoinSpec(file="side.parquet", by=["k"])}, ["t.v"])
    with pytest.raises(DataError, match="another name of the join"):
        read(job)
    write(folder, "side-2.parquet", pa.table({"k": [1.0], "t": [1], "v": [1.0]}))
    job = job_of(folder, {"j": JoinSpec(file="side*.parquet", by=["k"])}, ["j.v"])
    with pytest.raises(DataError, match=r"data\.join\.j\.file.*the columns and types of"):
        read(job)
    job = job_of(folder, {"j": JoinSpec(file="gone.parquet", by=["k"])}, ["j.v"])
    with pytest.raises(DataError, match=r"data\.join\.j\.file"):
        read(job)


def test_samples_of_a_source_are_joined_too(folder):
    code = "def make(path, name): return [{'y': 1, 'k': k} for k in (3, 1, 2)]"
    (folder / "own.py").write_text(code)
    job = job_of(folder, {"j": JoinSpec(file="side.parquet", by=["k"])}, ["j.v"], "train")
    job.data.source = "own.py:make"
    assert read(job)[:, 0].tolist() == [0, 7.5, 0]


def test_files_that_are_joined_and_changed_since_are_not_read(tmp_path):
    write(tmp_path, "a.parquet", pa.table({"k": [1, 2], "y": [0, 1]}))
    write(tmp_path, "b.csv", pa.table({"k": [1, 2], "v": [3.0, 4.0]}))
    job = job_of(tmp_path, {"b": JoinSpec(file="b.csv", by=["k"])}, ["b.v"])
    dataset = Dataset(job.data, "train", job.directory)
    before = dataset.contents
    write(tmp_path, "b.csv", pa.table({"k": [1, 2], "v": [3.5, 4.5]}))
    with pytest.raises(DataError, match=r"b\.csv: contents: .* as it was when reading began"):
        dataset.encoded()
    assert Dataset(job.data, "train", job.directory).contents != before
