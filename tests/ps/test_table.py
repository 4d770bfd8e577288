"""The engine, in process: optimizers, first values, duplicates, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps import LocalTable, TableError

DIM = 5
OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "learning_rate": 0.1},
    {"optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.02},
    {"optimizer": "adagrad", "learning_rate": 0.1},
    {
        "optimizer": "adagrad",
        "learning_rate": 0.2,
        "initial_accumulator": 0.1,
        "epsilon": 1e-6,
        "weight_decay": 0.01,
    },
    {"optimizer": "adam", "learning_rate": 0.01},
    {
        "optimizer": "adam",
        "learning_rate": 0.05,
        "beta1": 0.8,
        "beta2": 0.95,
        "epsilon": 1e-4,
        "weight_decay": 0.1,
    },
]


class Reference:
    """One dictionary, float64 NumPy, the formulas as published."""

    def __init__(self, first: dict[int, np.ndarray], options: dict[str, Any]) -> None:
        self.w = {k: v.astype(np.float64) for k, v in first.items()}
        self.o = {"weight_decay": 0.0, "initial_accumulator": 0.0} | options
        self.a = {k: np.full(DIM, self.o["initial_accumulator"]) for k in first}
        self.m = {k: np.zeros(DIM) for k in first}
        self.v = {k: np.zeros(DIM) for k in first}
        self.t = dict.fromkeys(first, 0)

    def push(self, keys: list[int], grads: np.ndarray) -> None:
        total: dict[int, np.ndarray] = {}
        for key, grad in zip(keys, grads.astype(np.float64), strict=True):
            total[key] = total.get(key, np.zeros(DIM)) + grad
        for key, grad in total.items():
            self._step(key, grad + self.o["weight_decay"] * self.w[key])

    def _step(self, key: int, g: np.ndarray) -> None:
        rate, kind = self.o["learning_rate"], self.o["optimizer"]
        if kind == "sgd":
            self.w[key] -= rate * g
        elif kind == "adagrad":
            self.a[key] += g * g
            self.w[key] -= rate * g / (np.sqrt(self.a[key]) + self.o.get("epsilon", 1e-10))
        else:
            b1, b2 = self.o.get("beta1", 0.9), self.o.get("beta2", 0.999)
            self.t[key] += 1
            self.m[key] = b1 * self.m[key] + (1 - b1) * g
            self.v[key] = b2 * self.v[key] + (1 - b2) * g * g
            m = self.m[key] / (1 - b1 ** self.t[key])
            v = self.v[key] / (1 - b2 ** self.t[key])
            self.w[key] -= rate * m / (np.sqrt(v) + self.o.get("epsilon", 1e-8))


@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda o: "-".join(map(str, o.values())))
def test_optimizer_follows_the_formula(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    universe = rng.integers(-(2**63), 2**63 - 1, 40)
    table = LocalTable.create("t", DIM, scale=1.0, **options)
    reference = Reference(dict(zip(universe.tolist(), table.pull(universe), strict=True)), options)
    for _ in range(30):
        keys = rng.choice(universe, 60)
        grads = rng.standard_normal((60, DIM)).astype(np.float32)
        table.push(keys, grads)
        reference.push(keys.tolist(), grads)
    expected = np.stack([reference.w[k] for k in universe.tolist()])
    np.testing.assert_allclose(table.pull(universe), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_optimizer_agrees_with_torch(kind: str) -> None:
    table = LocalTable.create("t", DIM, optimizer=kind, learning_rate=0.1, scale=1.0)
    weights = torch.nn.Parameter(torch.from_numpy(table.pull([7])))
    makers: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
    }
    optimizer = makers[kind]([weights], lr=0.1)
    for _ in range(20):
        weights.grad = torch.randn(1, DIM)
        table.push(torch.tensor([7]), weights.grad)
        optimizer.step()
    np.testing.assert_allclose(table.pull([7]), weights.detach().numpy(), rtol=1e-4, atol=1e-5)


any_key = st.one_of(
    st.integers(0, 12), st.sampled_from([2**64 - 1, 2**63, 2**32]), st.integers(0, 2**64 - 1)
)
operations = st.lists(
    st.tuples(
        st.sampled_from(["pull", "peek", "push"]), st.lists(any_key, min_size=0, max_size=30)
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(operations)
def test_behaves_like_a_dictionary(steps: list[tuple[str, list[int]]]) -> None:
    options = {"optimizer": "sgd", "learning_rate": 0.5, "initializer": "uniform", "scale": 1.0}
    table = LocalTable.create("t", 3, seed=9, **options)
    fresh = LocalTable.create("f", 3, seed=9, **options)
    model: dict[int, np.ndarray] = {}
    for step, (action, values) in enumerate(steps):
        keys = np.array(values, np.uint64)
        first = fresh.pull(keys)
        if action == "peek":
            got = table.pull(keys, read_only=True)
            rows = [model.get(k, f) for k, f in zip(values, first, strict=True)]
        else:
            for k, f in zip(values, first, strict=True):
                model.setdefault(k, f.copy())
            if action == "push":
                table.push(keys, np.full((len(keys), 3), step, np.float32))
                for k in values:
                    model[k] = model[k] - np.float32(0.5) * np.float32(step)
            got = table.pull(keys)
            rows = [model[k] for k in values]
        np.testing.assert_allclose(got, np.reshape(rows, (-1, 3)), rtol=1e-5, atol=1e-5)
        assert len(table) == len(model)
    assert sorted(table.keys().tolist()) == sorted(model)


def test_repeated_keys_step_once_on_the_sum() -> None:
    keys = np.array([4, 9, 4, 4], np.int64)
    grads = np.arange(12, dtype=np.float32).reshape(4, 3)
    a = LocalTable.create("t", 3, optimizer="adagrad", learning_rate=0.1)
    b = LocalTable.create("t", 3, optimizer="adagrad", learning_rate=0.1)
    a.push(keys, grads)
    b.push([4, 9], np.stack([grads[0] + grads[2] + grads[3], grads[1]]))
    np.testing.assert_array_equal(a.pull([4, 9]), b.pull([4, 9]))


def test_large_batches_match_small_ones() -> None:
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 30_000, 50_000)
    grads = rng.standard_normal((50_000, 4)).astype(np.float32)
    options: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0, "seed": 5}
    a, b = LocalTable.create("t", 4, **options), LocalTable.create("t", 4, **options)
    a.push(keys, grads)
    for begin in range(0, 50_000, 5_000):
        b.push(keys[begin : begin + 5_000], grads[begin : begin + 5_000])
    np.testing.assert_allclose(a.pull(keys), b.pull(keys), rtol=1e-3, atol=1e-4)


def test_first_values_depend_on_seed_and_key_alone() -> None:
    keys = np.arange(20_000)
    tables = [
        LocalTable.create("t", 16, initializer="normal", scale=0.5, seed=s) for s in (1, 1, 2)
    ]
    a = tables[0].pull(keys)
    b = np.concatenate([tables[1].pull(keys[::-1][i : i + 999]) for i in range(0, 20_000, 999)])
    np.testing.assert_array_equal(a, b[::-1])
    assert not np.isclose(a, tables[2].pull(keys)).all(axis=1).any()
    assert abs(a.mean()) < 0.005
    assert abs(a.std() - 0.5) < 0.005
    u = LocalTable.create("t", 16, initializer="uniform", scale=2.0).pull(keys)
    assert u.min() >= -2
    assert u.max() < 2
    assert abs(u.mean()) < 0.02
    assert abs(u.std() - 4 / 12**0.5) < 0.02
    assert abs(np.corrcoef(u.T) - np.eye(16)).max() < 0.05
    assert not LocalTable.create("t", 16, initializer="zeros").pull(keys).any()


def test_any_shape_and_framework() -> None:
    table = LocalTable.create("t", 4)
    keys = torch.arange(6).reshape(2, 3)
    rows = table.pull(keys)
    assert rows.shape == (2, 3, 4)
    assert rows.dtype == np.float32
    table.push(keys, torch.ones(2, 3, 4, dtype=torch.bfloat16, requires_grad=True))
    table.push(keys.numpy().astype(np.int32), np.ones((6, 4), np.float64))
    np.testing.assert_array_equal(table.pull([-1]), table.pull(np.array([2**64 - 1], np.uint64)))
    assert table.pull([]).shape == (0, 4)
    table.push([], np.empty((0, 4), np.float32))


@pytest.mark.parametrize(
    ("keys", "grads", "message"),
    [
        ([1.5], [[1.0, 2.0]], "dtype float64"),
        ([1], [[1.0]], r"shape \[1, 1\]; expected \[1, 2\]"),
        ([1, 2], [[1.0, 2.0]], "for each of the 2 keys"),
        ([1], [[1, 2]], "expected floats"),
        ([3, 77], [[0.0, 0.0], [0.0, float("nan")]], "key 77 .* is -?nan at element 1"),
        ([3, 77], [[0.0, float("-inf")], [0.0, 0.0]], "key 3 .* is -inf at element 1"),
        ([5], [[1e300, 0.0]], "key 5 .* is inf at element 0"),
    ],
)
def test_bad_gradients_are_refused(keys: Any, grads: Any, message: str) -> None:
    table = LocalTable.create("users", 2, optimizer="sgd")
    before = table.pull([1, 3, 5, 77])
    with pytest.raises(TableError, match=message):
        table.push(np.array(keys), np.array(grads))
    np.testing.assert_array_equal(table.pull([1, 3, 5, 77]), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adagard"}, "unknown optimizer 'adagard'.*did you mean 'adagrad'"),
        ({"initializer": "gauss"}, "unknown initializer 'gauss'; expected zeros"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1; expected a finite number >= 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"optimizer": "sgd", "beta1": 0.9}, "beta1=0.9 does not belong to sgd"),
        ({"optimizer": "adam", "beta2": 1.0}, "beta2=1.0; expected 0 <= beta2 < 1"),
        ({"seed": -1}, "seed=-1"),
        ({"dim": 0}, "dim=0; expected an integer of 1"),
        ({"dim": 2.0}, "dim=2.0"),
        ({"name": "../x"}, "table name '../x'"),
        ({"name": ""}, "table name ''"),
    ],
)
def test_bad_specs_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TableError, match=message):
        LocalTable.create(**({"name": "t", "dim": 4} | options))
