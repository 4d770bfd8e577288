"""Rows that come by streams, as between hosts: where they come, they stay."""

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ps import LocalShards, ParameterClient
from ps.client.fetch import Wanted, fetch
from ps.client.pull import Plan
from ps.engine import _native

DIM = 16
COUNT = 26 * 4096
_RNG = np.random.default_rng(0)
DISTINCT = _RNG.permutation(np.arange(COUNT, dtype=np.uint64))
# One slot of 26 has a key for each sample, the others the same ones in all of them.
ONE_SLOT = np.where(np.arange(COUNT) % 26 == 0, DISTINCT, np.arange(COUNT) % 26).astype(np.uint64)
BATCHES = {
    "distinct": DISTINCT,
    "nearly": np.concatenate([DISTINCT[:-2000], DISTINCT[:2000]]),
    "one slot": ONE_SLOT,
    "pairs": np.concatenate([DISTINCT[: COUNT // 2]] * 2),
    "few": DISTINCT[:300].repeat(3),
    "none": DISTINCT[:0],
}


@pytest.fixture(scope="module", params=[1, 3])
def client(request: pytest.FixtureRequest) -> Iterator[ParameterClient]:
    with (
        LocalShards(request.param) as shards,
        ParameterClient(shards.addresses, timeout_s=20, shared_memory=False) as connected,
    ):
        for table in ("t", "u"):
            connected.create_table(
                table, DIM, optimizer="sgd", learning_rate=1.0, initializer="zeros"
            )
            connected.push(table, DISTINCT, -_rows(DISTINCT))
        yield connected


def _rows(keys: NDArray[np.uint64]) -> NDArray[np.float32]:
    return (keys[..., None] * np.uint64(DIM) + np.arange(DIM, dtype=np.uint64)).astype(np.float32)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("background", [False, True])
def test_each_key_has_its_row(client: ParameterClient, name: str, background: bool) -> None:
    keys = BATCHES[name]
    rows = client.pull_async("t", keys).result(20) if background else client.pull("t", keys)
    np.testing.assert_array_equal(rows, _rows(keys))


def test_what_repeats_is_found_however_it_lies(client: ParameterClient) -> None:
    session = client.session()
    one = len(session.routes.addresses) == 1
    asked = {name: len(Plan.of(session, keys, False).keys) for name, keys in BATCHES.items()}
    unique = {name: len(np.unique(keys)) for name, keys in BATCHES.items()}
    as_they_are = {"distinct", "nearly"} if one else set()
    expected = {n: len(BATCHES[n]) if n in as_they_are else unique[n] for n in BATCHES}
    assert asked == expected


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_a_sample_says_whether_keys_repeat(
    client: ParameterClient, share: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    distinct = COUNT - int(share * COUNT)
    keys = np.concatenate([np.arange(distinct), draw.integers(0, distinct, COUNT - distinct)])
    keys = draw.permutation(keys).astype(np.uint64)
    one = len(client.session().routes.addresses) == 1
    plan = Plan.of(client.session(), keys, False)
    assert (plan.inverse is None) == (one and share < 0.05)


def test_the_caller_s_keys_may_change_at_once(client: ParameterClient) -> None:
    for distinct in (False, True):
        keys = DISTINCT.copy()
        future = client.pull_async("t", keys, distinct=distinct)
        keys[:] = 0
        np.testing.assert_array_equal(future.result(20), _rows(DISTINCT))


def test_an_array_is_the_caller_s_own(client: ParameterClient) -> None:
    first = client.pull("t", DISTINCT)
    both = client.pull_many({"t": DISTINCT[:5000], "u": DISTINCT[5000:7000]}, distinct=True)
    for rows in (first, *both.values()):
        assert rows.flags.writeable
        assert rows.ctypes.data % 16 == 0
    first[:] = 7
    both["t"][:] = 8
    np.testing.assert_array_equal(both["u"], _rows(DISTINCT[5000:7000]))
    np.testing.assert_array_equal(client.pull("t", DISTINCT), _rows(DISTINCT))


@pytest.mark.parametrize("dim", [1, 3, 16])
def test_rows_of_any_size_begin_where_arrays_do(client: ParameterClient, dim: int) -> None:
    client.create_table(f"of_{dim}", dim, initializer="uniform")
    keys = DISTINCT[:1237]
    rows = client.pull_unique(f"of_{dim}", keys)
    assert rows.ctypes.data % 16 == 0
    np.testing.assert_array_equal(rows, client.pull(f"of_{dim}", keys[::-1])[::-1])


def test_what_is_lent_cannot_be_written_to(client: ParameterClient) -> None:
    addresses = client.session().routes.addresses
    with ParameterClient(addresses, timeout_s=20) as near:
        session = near.session()
        keys = _native.partition(DISTINCT[:100], session.routes.route, len(addresses))[0][0]
        wanted = Wanted("t", DIM, keys, "float32", read_only=True)
        lent = fetch(session, session.routes, session.shards[0], [wanted])
        assert lent.rows[0].readonly
        lent.release()
