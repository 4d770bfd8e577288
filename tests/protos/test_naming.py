"""Jobs never claim one another's tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.naming import cuts_of, kept_place, kept_with, table_prefix

IDS = st.text("ab.-_1", min_size=1, max_size=6)


@given(IDS, IDS, IDS)
def test_no_other_jobs_table_begins_with_a_jobs_prefix(one, other, table):
    begins = (table_prefix(other) + table).startswith(table_prefix(one))
    assert begins == (one == other)


def test_a_kept_model_moves_with_the_scheduler():
    assert kept_with("heterps://old:1/job.a", "new:2") == "heterps://new:2/job.a"
    assert kept_with("heterps://old:1/job.a/cuts/5", "new:2") == "heterps://new:2/job.a/cuts/5"
    assert kept_with("/models/job.a", "new:2") == "/models/job.a"
    assert cuts_of("heterps://old:1/job.a") == "heterps://old:1/job.a/cuts"
    assert cuts_of("/models/job.a") == "/models/job.a.cuts"
    assert kept_place("heterps://new:2/job.a/tables") == ("new:2", "job.a", "tables")
    with pytest.raises(ValueError, match="expected heterps://"):
        kept_place("heterps://new:2")
