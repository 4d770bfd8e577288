"""Inputs by name of a job file."""

import pytest

from heterps.job.file import JobFileError, load_job


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (
            "{type: kex}",
            "x.type: got 'kex', expected one of key, keys, float, floats, int, ints, mask, "
            "image; did you",
        ),
        ("{type: keys}", "x.length: got 0, expected 1 to 65536 values of a list"),
        ("{type: key, length: 3}", "x.length: got 3, expected none of a key"),
        ("{type: float, slot: user}", "x.slot: got 'user', expected none of a float"),
        ("{type: image}", "x.shape: got [], expected channels (1, 3 or 4), height and width"),
        ("{type: image, shape: [2, 8, 8]}", "x.shape: got [2, 8, 8], expected channels"),
        ("{type: image, shape: [3, 8, 0]}", "x.shape: got [3, 8, 0], expected 1 to 16777216"),
        ("{type: image, shape: [3, 8, 8], fit: cut}", "x.fit: got 'cut', expected one of resize"),
        ("{type: keys, shape: [3]}", "x.shape: got [3], expected none of a keys"),
        ("{type: floats, shape: [3], fit: crop}", "x.fit: got 'crop', expected none of a floats"),
        ("{type: ints, shape: [3], padding: 1}", "x.shape: got [3], expected no length, keep or"),
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
    with pytest.raises(JobFileError, match=r"data\.columns\.größe: .*ASCII"):
        load_job(job, [*given, "data.columns.größe={type: float}"])


@pytest.mark.parametrize(
    ("join", "expected"),
    [
        ("{file: users.parquet}", "data.join.users.by: got [], expected columns that both have"),
        ("{by: [user]}", "data.join.users.file: got '', expected a file name or glob"),
        ("{file: u.csv, by: [a=b=c]}", "data.join.users.by: got 'a=b=c', expected a column, or"),
        ("{file: u.csv, time: =at}", "data.join.users.time: got '=at', expected a column, or one"),
    ],
)
def test_a_wrong_join_is_named(job, join, expected):
    right = load_job(job, ["data.join.users={file: u.csv, by: [user, a=b], time: at}"])
    assert list(right.data.join["users"].by) == ["user", "a=b"]
    with pytest.raises(JobFileError) as caught:
        load_job(job, [f"data.join.users={join}"])
    assert expected in "\n".join(caught.value.problems)
