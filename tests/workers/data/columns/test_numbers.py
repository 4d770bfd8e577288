"""Whole numbers are what the file says, or an error."""

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from protos.job_pb2 import ColumnSpec, JobSpec
from workers.data import DataError, Dataset
from workers.data.check import check
from workers.data.tensors import first_samples

LARGE = [2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63) + 1, 0, 5]
FLOAT, SMALL = pa.float64(), pa.float32()


def read(folder, values, kind=None, text=False):
    column = pa.array(values, kind)
    table = pa.table({"n": column, "y": [0] * len(column)})
    job = JobSpec(directory=str(folder))
    job.data.path, job.data.label = ".", "y"
    job.data.columns["n"].CopyFrom(ColumnSpec(type="int"))
    if text:
        lines = "".join(f"{value},0\n" for value in values)
        (folder / "a.csv").write_text("n,y\n" + lines)
    else:
        pq.write_table(table, folder / "a.parquet")
    job.data.train = "a.csv" if text else "a.parquet"
    check(job)
    return first_samples(Dataset.of(job, "train"), len(column))["n"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (LARGE, pa.int64()),
        ([0, 2**63 - 1], pa.uint64()),
        ([Decimal(2**53 + 1), Decimal(7)], pa.decimal128(38, 3)),
        ([True, False], pa.bool_()),
        ([2.0**53, -3.0], FLOAT),
        ([2.0**24, -3.0], SMALL),
    ],
)
def test_whole_numbers_are_exact(tmp_path, values, kind):
    found = read(tmp_path, values, kind)
    assert found.dtype == np.int64
    assert found.tolist() == [int(value) for value in values]


def test_whole_numbers_of_text_are_exact(tmp_path):
    texts = [str(value) for value in LARGE]
    assert read(tmp_path, texts, text=True).tolist() == LARGE
    mixed = [*texts, "5.0", "1e3", "-9007199254740993.0"]
    assert read(tmp_path, mixed, text=True).tolist() == [*LARGE, 5, 1000, -9007199254740993]


@pytest.mark.parametrize(
    ("values", "kind", "text", "expected"),
    [
        (
            [1, 2**63],
            pa.uint64(),
            False,
            r"row 2: data\.columns\.n\.of: n: got 9223372036854775808",
        ),
        ([1, None], pa.int64(), False, r"row 2.*'missing'"),
        ([1.0, None], FLOAT, False, r"row 2.*'missing'"),
        ([1.0, 2.0**54], FLOAT, False, r"row 2.*at most 2\^53"),
        ([1.0, 1.5], SMALL, False, r"row 2.*1\.5"),
        ([1.0, float("inf")], FLOAT, False, r"row 2.*inf"),
        ([Decimal(1), Decimal("1.5")], pa.decimal128(38, 3), False, r"row 2"),
        ([Decimal(1), Decimal(2**63)], pa.decimal128(38, 3), False, r"row 2"),
        (["1", "4503599627370496.5"], None, True, r"row 2.*4503599627370496\.5"),
        (["1", "0.99999999999999999999"], None, True, r"row 2.*0\.9999"),
        (["1", "9223372036854775808"], None, True, r"row 2.*9223372036854775808"),
        (["1", "NA"], None, True, r"row 2.*NA"),
        (["1", "many"], None, True, r"row 2.*many"),
        (["1", "1e400"], None, True, r"row 2.*1e400"),
        (["1", "inf"], None, True, r"row 2.*inf"),
    ],
)
def test_what_is_not_whole_or_too_large_is_named(tmp_path, values, kind, text, expected):
    with pytest.raises(DataError, match=expected):
        read(tmp_path, values, kind, text)


HALVES = [1.5, None, -0.25, 65504.0, 3.0]  # of which 65504 is the largest


def halves(folder, values):
    """A job that reads float16 as numbers, of a Parquet file that says which there are."""
    column = pa.array(np.array([np.nan if v is None else v for v in values], np.float16))
    column = pc.if_else(pa.array([v is not None for v in values]), column, None)
    table = pa.table({"n": column, "m": column, "y": pa.array(np.ones(len(values), np.float16))})
    pq.write_table(table, folder / "a.parquet")
    job = JobSpec(directory=str(folder))
    job.data.path, job.data.train, job.data.label = ".", "a.parquet", "y"
    job.data.dense.append("n")
    job.data.columns["m"].type = "float"
    job.train.loss = "bce_with_logits"
    check(job)
    return Dataset.of(job, "train")


def test_float16_is_read_as_any_number(tmp_path):
    found = first_samples(halves(tmp_path, HALVES), len(HALVES))
    expected = [value or 0.0 for value in HALVES]
    assert found["dense"][:, 0].tolist() == found["m"].tolist() == expected


def test_an_infinite_float16_is_named(tmp_path):
    with pytest.raises(DataError, match=r"row 2: data\.dense: n.*inf"):
        halves(tmp_path, [1.0, np.inf])
