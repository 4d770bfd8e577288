"""Jobs never claim one another's tables."""

from hypothesis import given
from hypothesis import strategies as st

from protos.naming import table_prefix

IDS = st.text("ab.-_1", min_size=1, max_size=6)


@given(IDS, IDS, IDS)
def test_no_other_jobs_table_begins_with_a_jobs_prefix(one, other, table):
    begins = (table_prefix(other) + table).startswith(table_prefix(one))
    assert begins == (one == other)
