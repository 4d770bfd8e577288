"""What every backend of a table promises: one body of tests, run over all of them."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ps import LocalShards, LocalTable, ParameterClient, TableError
from ps.table.rules import Segment
from tests.rounds import more

Floats = NDArray[np.float32]
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.5, "scale": 1.0, "seed": 5}
ADAGRAD: dict[str, Any] = {"optimizer": "adagrad", "learning_rate": 0.1, "scale": 1.0, "seed": 5}
BIG = [2**32 - 1, 2**32, 2**63, 2**64 - 1]
FIELDS = ("rows", "pulled", "pushed", "missed", "waiting", "evicted", "disk_rows")
_numbers = itertools.count()


@dataclass
class Backend:
    """One way to hold a table.

    Attributes:
        client: none for a table in this process.
        options: of every table made.
        rtol, atol: what a value may lose on its way and at rest, of the row's largest.
        segmented: the columns are split over segments.
    """

    client: ParameterClient | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rtol: float = 0.0
    atol: float = 0.0
    segmented: bool = False

    def create(self, dim: int, **options: Any) -> "Handle":
        name = f"contract-{next(_numbers)}"
        options = options | self.options
        if self.segmented:
            own = {"optimizer", "learning_rate", "initializer", "scale", "seed"}
            given = {k: options.pop(k) for k in own & options.keys()}
            dims = [dim] if dim == 1 else [dim // 2, dim - dim // 2]
            options["segments"] = [Segment(dim=d, **given) for d in dims]
        if self.client is None:
            return Handle(self, name, dim, LocalTable.create(name, dim, **options))
        assert self.client.create_table(name, dim, **options)
        return Handle(self, name, dim, None)


@dataclass
class Handle:
    """A table of a backend."""

    backend: Backend
    name: str
    dim: int
    local: LocalTable | None

    @property
    def client(self) -> ParameterClient:
        assert self.backend.client is not None
        return self.backend.client

    def pull(self, keys: Any, read_only: bool = False) -> Floats:
        if self.local is not None:
            return self.local.pull(keys, read_only)
        return self.client.pull(self.name, keys, read_only)

    def push(self, keys: Any, grads: Any, **how: Any) -> None:
        if self.local is not None:
            self.local.push(keys, grads, **how)
        else:
            self.client.push(self.name, keys, grads, **how)

    def add(self, keys: Any, deltas: Any) -> None:
        if self.local is not None:
            self.local.push(keys, deltas, kind="add")
        else:
            self.client.add(self.name, keys, deltas)

    def assign(self, keys: Any, values: Any) -> None:
        if self.local is not None:
            self.local.push(keys, values, kind="assign")
        else:
            self.client.assign(self.name, keys, values)

    def save(self, path: Path) -> None:
        if self.local is not None:
            self.local.save(path)
        else:
            self.client.save(path, prefix=self.name)

    def load(self, path: Path) -> None:
        if self.local is not None:
            self.local.load(path)
        else:
            self.client.load(path)

    def keys(self) -> list[int]:
        found = self.local.keys() if self.local else self.client.keys(self.name, 1 << 20)
        return sorted(found.tolist())

    def counters(self) -> dict[str, int]:
        if self.local is not None:
            found = self.local.counters
            return {name: found[name] for name in FIELDS}
        tables = [t for s in self.client.stats() for t in s.tables if t.name == self.name]
        assert all(t.dim == self.dim and t.spec.name == self.name for t in tables)
        return {name: sum(getattr(t, name) for t in tables) for name in FIELDS}

    def assert_rows(self, keys: Any, expected: Any, steps: int = 1) -> None:
        """Its rows are those, but for what the backend loses at each of so many steps."""
        got, want = self.pull(keys), np.asarray(expected, np.float32)
        assert got.dtype == np.float32
        backend = self.backend
        largest = np.abs(want).max(axis=-1, keepdims=True, initial=1.0) if want.size else 1.0
        bound = steps * (backend.rtol * np.maximum(np.abs(want), 2.0) + backend.atol * largest)
        assert got.shape == want.shape
        assert (np.abs(got - want) <= bound + 1e-6 * np.abs(want)).all(), (got, want)


LOCAL: dict[str, tuple[dict[str, Any], float, float, bool]] = {
    "local": ({}, 0.0, 0.0, False),
    "local-tiered": ({"memory_bytes": 1 << 16}, 0.0, 0.0, False),
    "local-float16": ({"dtype": "float16"}, 2.0**-10, 1e-7, False),
    "local-bfloat16": ({"dtype": "bfloat16"}, 2.0**-7, 0.0, False),
    "local-int8": ({"dtype": "int8"}, 0.0, 1 / 60, False),
    "local-stochastic": ({"dtype": "bfloat16", "stochastic_rounding": True}, 2.0**-6, 0.0, False),
    "local-segments": ({}, 0.0, 0.0, True),
}
REMOTE: dict[str, tuple[int, dict[str, Any], dict[str, Any], float, bool]] = {
    "shard": (1, {}, {}, 0.0, False),
    "shards": (3, {}, {}, 0.0, False),
    "shards-sockets": (3, {"shared_memory": False, "channels": 2}, {}, 0.0, False),
    "shards-grpc": (3, {"shared_memory": False, "streams": False}, {}, 0.0, False),
    "shards-float16-wire": (3, {"wire": "float16"}, {}, 2.0**-9, False),
    "shards-bfloat16-wire": (3, {"wire": "bfloat16"}, {}, 2.0**-6, False),
    "shards-tiered": (3, {}, {"memory_bytes": 1 << 16}, 0.0, False),
    "shards-log": (3, {}, {"durability": "log"}, 0.0, False),
    "shards-segments": (3, {"shared_memory": False}, {}, 0.0, True),
}


@pytest.fixture(scope="module")
def replicated() -> Iterator[LocalShards]:
    with LocalShards(1, replicas=True) as running:
        yield running


@pytest.fixture(scope="module", params=[*LOCAL, *REMOTE, "shard-replica"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    kind = request.param
    if kind in LOCAL:
        options, rtol, atol, segmented = LOCAL[kind]
        yield Backend(None, options, rtol, atol, segmented)
        return
    if kind == "shard-replica":
        addresses = request.getfixturevalue("replicated").addresses
        connect, options, rtol, segmented = {}, {"durability": "replica"}, 0.0, False
    else:
        count, connect, options, rtol, segmented = REMOTE[kind]
        addresses = request.getfixturevalue("shards").addresses[:count]
    with ParameterClient(addresses, timeout_s=20, **connect) as client:
        yield Backend(client, options, rtol, 1e-7 if rtol else 0.0, segmented)
        client.drop_tables("contract-")


@pytest.mark.parametrize("dim", [1, 8, 17, *more(2, 3, 7, 9, 16, 32, 33)])
def test_a_missing_key_reads_its_first_value(backend: Backend, dim: int) -> None:
    table = backend.create(dim, **SGD)
    keys = np.array([[0, 1, 2], [7, 2**32, 2**64 - 1]], np.uint64)
    first = table.pull(keys)
    assert first.shape == (2, 3, dim)
    assert abs(first).max() <= 1
    assert len(np.unique(first[..., 0])) == 6 or backend.options.get("dtype") == "int8"
    np.testing.assert_array_equal(table.pull(keys[::-1], read_only=True), first[::-1])
    assert table.counters()["rows"] == 0
    if not backend.segmented:  # whose seeds are mixed with the column
        plain = LocalTable.create("plain", dim, **SGD)
        table.assert_rows(keys, plain.pull(keys))
    # It is what training begins with.
    table.push(keys, np.zeros((2, 3, dim), np.float32))
    table.assert_rows(keys, first)
    assert table.keys() == sorted(keys.ravel().tolist())


@pytest.mark.parametrize("dim", [1, 17, *more(3, 8, 33)])
def test_gradients_of_repeated_keys_sum(backend: Backend, dim: int) -> None:
    table = backend.create(dim, **SGD)
    keys = np.array([4, 9, 4, 4, 2**40])
    first = table.pull(keys)
    rng = np.random.default_rng(dim)
    grads = rng.integers(-4, 5, (5, dim)).astype(np.float32)
    table.push(keys, grads)
    total = grads[[0, 1, 0, 0, 4]]
    total[[0, 2, 3]] += grads[2] + grads[3]
    table.assert_rows(keys, first - 0.5 * total)
    table.push(keys[:2], grads[:2])
    table.assert_rows([4, 9], (first - 0.5 * total)[:2] - 0.5 * grads[:2], steps=2)


def test_repeated_keys_take_one_step(backend: Backend) -> None:
    """Adagrad on a sum is not Adagrad twice."""
    table = backend.create(4, **ADAGRAD | {"initializer": "zeros"})
    table.push([4, 9, 4, 4], np.array([[1] * 4, [2] * 4, [3] * 4, [-1] * 4], np.float32))
    table.assert_rows([4, 9], np.full((2, 4), -0.1))
    table.push([4, 4], np.array([[3] * 4, [1] * 4], np.float32))
    table.assert_rows([4], np.full((1, 4), -0.1 - 0.4 / np.sqrt(3.0**2 + 4.0**2)), steps=2)


def test_add_and_assign_pass_the_optimizer_by(backend: Backend) -> None:
    table = backend.create(3, **ADAGRAD)
    first = table.pull([1, 2, 3])
    table.add([1, 2, 1], np.array([[1, 2, 3], [4, 5, 6], [10, 20, 30]], np.float32))
    table.assert_rows([1, 2], first[:2] + np.array([[11, 22, 33], [4, 5, 6]]), steps=2)
    values = np.array([[1, 1, 1], [7, 8, -9], [0.5, 0.25, -1]], np.float32)
    table.assign([3, 5, 3], values)
    table.assert_rows([3, 5], values[[2, 1]])  # of equal keys the last holds
    table.assign([1], np.zeros((1, 3), np.float32))
    table.assert_rows([1, 2], [np.zeros(3), first[1] + [4, 5, 6]], steps=2)
    table.push([1], np.full((1, 3), 5, np.float32))  # Adagrad's first step: no state before
    table.assert_rows([1], np.full((1, 3), -0.1), steps=2)
    assert table.keys() == [1, 2, 3, 5]


def test_keys_of_any_width_and_sign(backend: Backend) -> None:
    table = backend.create(2, **SGD | {"initializer": "zeros"})

    def count(keys: Any) -> None:
        shape = (*np.shape(keys), 2)
        table.push(keys, np.full(shape, -2, np.float32))

    count([0, 5])  # these fit four bytes on the wire
    count(np.array([5, 2**32 - 1], np.uint64))
    count(np.array([2**32, 2**32 + 5], np.uint64))  # these do not, and 5 is not 2**32 + 5
    count(np.array([-1, -(2**63), 5]))
    count(np.array([2**64 - 1, 2**63], np.uint64))
    count(np.array([5, -1], np.int32))
    count(torch.tensor([5, -1]))
    expected = {0: 1, 5: 5, 2**32 - 1: 1, 2**32: 1, 2**32 + 5: 1, 2**64 - 1: 4, 2**63: 2, 1: 0}
    every = np.array(list(expected), np.uint64)
    table.assert_rows(every, np.repeat([[n] for n in expected.values()], 2, axis=1), steps=5)
    table.assert_rows([0, 5, 1], [[1, 1], [5, 5], [0, 0]], steps=5)
    table.assert_rows(torch.tensor([-1, -(2**63)]), [[4, 4], [2, 2]], steps=5)
    assert table.keys() == sorted(k for k in expected if k != 1)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (5, 1), (2, 3, 4)])
def test_shapes(backend: Backend, shape: tuple[int, ...]) -> None:
    table = backend.create(3, **SGD | {"initializer": "zeros"})
    keys = np.arange(int(np.prod(shape))).reshape(shape) + 7
    grads = np.arange(keys.size * 3, dtype=np.float32).reshape(*shape, 3) % 50
    table.push(keys, grads)
    table.assert_rows(keys, -0.5 * grads)
    table.push(torch.from_numpy(np.asarray(keys)), torch.from_numpy(grads.reshape(-1, 3)))
    table.assert_rows(torch.from_numpy(np.asarray(keys)), -grads, steps=2)
    assert table.counters()["rows"] == keys.size


def test_torch_gradients_of_other_dtypes(backend: Backend) -> None:
    table = backend.create(4, **SGD | {"initializer": "zeros"})
    keys = torch.arange(6).reshape(2, 3)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        table.push(keys, torch.ones(2, 3, 4, dtype=dtype, requires_grad=True))
    table.push(keys.int().numpy(), np.ones((6, 4), np.float16))
    table.assert_rows(keys, np.full((2, 3, 4), -2.0), steps=4)


def test_many_keys_in_any_order(backend: Backend) -> None:
    rng = np.random.default_rng(0)
    table = backend.create(5, **SGD)
    universe = np.unique(np.concatenate([rng.integers(0, 2**64, 9000, np.uint64), np.uint64(BIG)]))
    expected = table.pull(universe)
    steps = 4
    for _ in range(steps):
        at = rng.integers(0, len(universe), 8000)
        grads = rng.integers(-2, 3, (8000, 5)).astype(np.float32) / 4
        table.push(universe[at], grads)
        total = np.zeros_like(expected)
        np.add.at(total, at, grads)
        expected -= np.float32(0.5) * total
    order = rng.permutation(len(universe))
    table.assert_rows(universe[order], expected[order], steps)
    at = rng.integers(0, len(universe), (50, 7))
    table.assert_rows(universe[at], expected[at], steps)
    counters = table.counters()
    assert counters["rows"] == len(table.keys()) <= len(universe)
    assert (counters["disk_rows"] > 0) == ("memory_bytes" in backend.options)


def test_the_rate_scales_the_step(backend: Backend) -> None:
    table = backend.create(2, **SGD | {"initializer": "zeros"})
    table.push([1], np.ones((1, 2), np.float32), rate=0.5)
    table.push([1], np.ones((1, 2), np.float32), rate=4.0)
    table.push([1, 2], np.ones((2, 2), np.float32), rate=0.0)
    table.assert_rows([1, 2], [[-2.25, -2.25], [0, 0]], steps=3)
    assert table.keys() == [1, 2]


def test_counters(backend: Backend) -> None:
    table = backend.create(2, **SGD)
    assert table.counters() == dict.fromkeys(FIELDS, 0)
    table.pull(np.arange(10))
    table.push(np.arange(6), np.zeros((6, 2), np.float32))
    table.pull(np.arange(4, 10), read_only=True)
    table.add([100], np.zeros((1, 2), np.float32))
    counters = table.counters()
    counters.pop("disk_rows")
    assert counters == {
        "rows": 7, "pulled": 16, "pushed": 7, "missed": 14, "waiting": 0, "evicted": 0,
    }  # fmt: skip


def test_a_checkpoint_brings_back_rows_and_state(backend: Backend, tmp_path: Path) -> None:
    table = backend.create(6, **ADAGRAD)
    rng = np.random.default_rng(1)
    keys = np.concatenate([rng.integers(0, 2**64, 2000, np.uint64), np.uint64(BIG)])
    grads = rng.standard_normal((3, len(keys), 6)).astype(np.float32)
    table.push(keys, grads[0])
    table.push(keys[::2], grads[1, ::2])
    table.save(tmp_path / "ck")
    saved = table.pull(keys)
    exact = not backend.options.get("stochastic_rounding")  # whose noise is another each time
    table.push(keys, grads[2])
    after = table.pull(keys)
    assert (after != saved).any(axis=1).all()
    table.push([77], np.ones((1, 6), np.float32))
    table.load(tmp_path / "ck")
    np.testing.assert_array_equal(table.pull(keys), saved)
    assert table.counters()["rows"] == len(np.unique(keys))
    assert table.keys() == sorted(np.unique(keys).tolist())  # 77 was made after the save
    table.push(keys, grads[2])
    if exact:
        np.testing.assert_array_equal(table.pull(keys), after)
    else:
        table.assert_rows(keys, after)
    # Whoever reads it need not be what wrote it.
    other = LocalTable.load_checkpoint(tmp_path / "ck")[table.name]
    assert sorted(other.keys().tolist()) == sorted(np.unique(keys).tolist())
    table.load(tmp_path / "ck")
    table.assert_rows(keys, other.pull(keys))


@pytest.mark.parametrize(
    ("keys", "grads", "message"),
    [
        ([1.5], [[1.0, 2.0]], "dtype float64; expected integers"),
        ([1], [[1.0]], r"shape \[1, 1\]; expected \[1, 2\]"),
        ([1, 2], [[1.0, 2.0]], "for each of the 2 keys"),
        ([1], [[1, 2]], "dtype int64; expected floats"),
        ([3, 77], [[0.0, 0.0], [0.0, float("nan")]], r"key 77 .* is -?nan at element 1"),
        ([3, 77], [[0.0, float("-inf")], [0.0, 0.0]], "key 3 .* is -inf at element 1"),
        ([5], [[1e300, 0.0]], "key 5 .* is inf at element 0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    backend: Backend, keys: Any, grads: Any, message: str
) -> None:
    table = backend.create(2, **SGD)
    before = table.pull([1, 3, 5, 77])
    for change in (table.push, table.add, table.assign):
        with pytest.raises(TableError, match=message):
            change(np.array(keys), np.array(grads))
    np.testing.assert_array_equal(table.pull([1, 3, 5, 77]), before)
    assert table.counters()["rows"] == 0


def test_concurrent_pushes_all_count(backend: Backend) -> None:
    table = backend.create(2, **SGD | {"learning_rate": 1.0, "initializer": "zeros"})
    keys = np.arange(200) % 50

    def work(_: int) -> None:
        for _ in range(4):
            table.push(keys, np.full((200, 2), -1, np.float32))
            table.pull(keys)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    table.assert_rows(np.arange(50), np.full((50, 2), 4 * 4 * 4))
