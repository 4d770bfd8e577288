"""Inputs by name of a job file."""

import pytest

from heterps.job.file import JobFileError, load_job


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (
            "{type: kex}",
            "x.type: got 'kex', expected one of key, keys, float, floats, int, ints, mask; did you",
        ),
        ("{type: keys}", "x.length: got 0, expected 1 to 65536 values of a list"),
        ("{type: key, length: 3}", "x.length: got 3, expected none of a key"),
        ("{type: float, slot: user}", "x.slot: got 'user', expected none of a float"),
        ("{of: clicked, type: float}", "x.of: got 'clicked', expected columns known before"),
    ],
)
def test_a_wrong_column_is_named(job, column, expected):
    given = ["data.columns.user={type: key}"]
    assert load_job(job, given).data.columns["user"].type == "key"
    with pytest.raises(JobFileError) as caught:
        load_job(job, [*given, f"data.columns.x={column}"])
    assert expected in "\n".join(caught.value.problems)
    with pytest.raises(JobFileError, match=r"data\.columns\.dense: got 'dense'"):
        load_job(job, [*given, "data.columns.dense={type: float}"])
