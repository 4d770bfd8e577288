"""Every update rule against its formula in float64, and at the edges of float32."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ps import LocalTable

Vector = NDArray[np.float64]
EPS = float(np.finfo(np.float32).eps)
DIMS = (1, 3, 16, 17)
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1}
MOMENTUM: dict[str, Any] = {"optimizer": "momentum", "learning_rate": 0.1, "momentum": 0.9}
ADAGRAD: dict[str, Any] = {"optimizer": "adagrad", "learning_rate": 0.1, "epsilon": 1e-10}
ROWWISE: dict[str, Any] = {"optimizer": "rowwise_adagrad", "learning_rate": 0.1, "epsilon": 1e-10}
ADAM: dict[str, Any] = {
    "optimizer": "adam",
    "learning_rate": 0.05,
    "epsilon": 1e-8,
    "beta1": 0.9,
    "beta2": 0.999,
}
ADAMW: dict[str, Any] = ADAM | {"optimizer": "adamw", "weight_decay": 0.0}
FTRL: dict[str, Any] = {
    "optimizer": "ftrl",
    "learning_rate": 0.1,
    "l1": 0.0,
    "l2": 0.0,
    "beta": 0.0,
}
RULES = (SGD, MOMENTUM, ADAGRAD, ROWWISE, ADAM, ADAM | {"amsgrad": True}, ADAMW, FTRL)
CASES = (
    *RULES,
    SGD | {"weight_decay": 0.02},
    MOMENTUM | {"weight_decay": 0.1, "momentum": 0.5},
    ADAGRAD | {"weight_decay": 0.01, "initial_accumulator": 0.1, "epsilon": 0.1},
    ROWWISE | {"weight_decay": 0.01, "initial_accumulator": 0.1, "epsilon": 0.1},
    ADAM | {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.95, "epsilon": 0.1},
    ADAM | {"amsgrad": True, "weight_decay": 0.1, "beta2": 0.5},
    ADAM | {"beta1": 0.0, "beta2": 0.0},
    ADAMW | {"weight_decay": 0.1},
    ADAMW | {"amsgrad": True, "beta2": 0.5, "weight_decay": 0.05},
    FTRL | {"l1": 0.5, "l2": 0.25, "beta": 1.0, "initial_accumulator": 0.1},
    FTRL | {"l1": 0.1, "weight_decay": 0.1},
    *(rule | {"clip_norm": 0.75} for rule in RULES),
    *(rule | {"bound": 0.5} for rule in RULES),
    *(rule | {"trust_ratio": True, "weight_decay": 0.05} for rule in RULES if rule is not FTRL),
    ADAM | {"clip_norm": 2.0, "bound": 0.9, "trust_ratio": True, "amsgrad": True},
)


def name_of(options: dict[str, Any]) -> str:
    base = next(r for r in RULES[::-1] if r.items() <= options.items() or r is SGD)
    extra = (f"{k}={v}" for k, v in options.items() if k == "optimizer" or base.get(k) != v)
    return ",".join(extra).removeprefix("optimizer=")


@dataclass
class Row:
    """A row's weights and whatever its rule remembers, by the names of the papers."""

    w: Vector
    velocity: Vector
    squares: Vector
    mean: Vector
    variance: Vector
    peak: Vector
    z: Vector
    steps: int = 0


@dataclass
class Reference:
    """One dictionary of float64 rows, stepped one key at a time."""

    options: dict[str, Any]
    rows: dict[int, Row] = field(default_factory=dict)

    def add(self, keys: list[int], first: NDArray[np.float32]) -> None:
        start = self.options.get("initial_accumulator", 0.0)
        for key, weights in zip(keys, first.astype(np.float64), strict=True):
            zeros = [np.zeros_like(weights) for _ in range(6)]
            self.rows[key] = Row(weights, *zeros)
            self.rows[key].squares += start

    def weights(self, keys: list[int]) -> Vector:
        return np.stack([self.rows[key].w for key in keys])

    def push(self, keys: list[int], grads: NDArray[np.float32], rate: float = 1.0) -> None:
        total: dict[int, Vector] = {}
        for key, grad in zip(keys, grads.astype(np.float64), strict=True):
            total[key] = total.get(key, np.zeros_like(grad)) + grad
        for key, grad in total.items():
            self._step(self.rows[key], grad, rate)

    def _step(self, row: Row, g: Vector, rate: float) -> None:
        o = self.options
        longest, norm = o.get("clip_norm", 0.0), float(np.linalg.norm(g))
        if longest and norm > longest:
            g = g * (longest / norm)
        decay = o.get("weight_decay", 0.0) * row.w
        apart = o["optimizer"] == "adamw"
        g = g if apart else g + decay
        if o["optimizer"] == "ftrl":
            row.w = self._ftrl(row, g, rate)
        else:
            direction, size = self._direction(row, g), o["learning_rate"] * rate
            direction = direction + decay if apart else direction
            weight, length = np.linalg.norm(row.w), np.linalg.norm(direction)
            if o.get("trust_ratio") and weight > 0 and length > 0:
                size *= weight / length
            row.w = row.w - size * direction
        if o.get("bound"):
            row.w = np.clip(row.w, -o["bound"], o["bound"])

    def _direction(self, row: Row, g: Vector) -> Vector:
        """What the learning rate multiplies."""
        o = self.options
        if o["optimizer"] == "sgd":
            return g
        if o["optimizer"] == "momentum":
            row.velocity = o["momentum"] * row.velocity + g
            return row.velocity
        if o["optimizer"] in {"adagrad", "rowwise_adagrad"}:
            squares = g * g
            row.squares = row.squares + (squares if o["optimizer"] == "adagrad" else squares.mean())
            adapted: Vector = g / (np.sqrt(row.squares) + o["epsilon"])
            return adapted
        b1, b2 = o["beta1"], o["beta2"]
        row.steps += 1
        row.mean = b1 * row.mean + (1 - b1) * g
        row.variance = b2 * row.variance + (1 - b2) * g * g
        row.peak = np.maximum(row.peak, row.variance)
        variance = row.peak if o.get("amsgrad") else row.variance
        mean = row.mean / (1 - b1**row.steps)
        corrected: Vector = mean / (np.sqrt(variance / (1 - b2**row.steps)) + o["epsilon"])
        return corrected

    def _ftrl(self, row: Row, g: Vector, rate: float) -> Vector:
        """Algorithm 1 of McMahan et al. (2013); a schedule scales the gradients that z sums."""
        o, n, alpha = self.options, row.squares, self.options["learning_rate"]
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / alpha
        row.z = row.z + rate * g - sigma * row.w
        row.squares = n + g * g
        curvature = (o["beta"] + np.sqrt(row.squares)) / alpha + o["l2"]
        solved = -(row.z - np.sign(row.z) * o["l1"]) / np.where(curvature > 0, curvature, 1)
        return np.where(np.abs(row.z) > o["l1"], solved, 0.0)


def make_pair(
    dim: int, options: dict[str, Any], keys: list[int], **initial: Any
) -> tuple[LocalTable, Reference]:
    table = LocalTable.create("t", dim, **({"scale": 1.0, "seed": 4} | initial | options))
    reference = Reference(options)
    reference.add(keys, table.pull(keys))
    return table, reference


def coarse(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Normal values of few bits, whose float32 sums are exact."""
    return (np.round(rng.standard_normal(shape) * 256) / 256).astype(np.float32)


def assert_follows(table: LocalTable, reference: Reference, steps: int) -> None:
    keys = list(reference.rows)
    expected = reference.weights(keys)
    atol = 2 * EPS * steps * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(table.pull(keys), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("options", CASES, ids=name_of)
def test_follows_the_formula(options: dict[str, Any], dim: int) -> None:
    rng = np.random.default_rng(dim)
    keys = rng.integers(0, 2**62, 30).tolist()
    table, reference = make_pair(dim, options, keys)
    steps = 12
    for step in range(steps):
        batch = rng.choice(keys, 50).tolist()
        grads, rate = coarse(rng, 50, dim), 1.0 / (1 + step % 4)
        table.push(batch, grads, rate=rate)
        reference.push(batch, grads, rate)
    assert_follows(table, reference, steps)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("options", "make"),
    [
        (SGD, torch.optim.SGD),
        (MOMENTUM, torch.optim.SGD),
        (ADAGRAD, torch.optim.Adagrad),
        (ADAGRAD | {"initial_accumulator": 0.3, "epsilon": 0.01}, torch.optim.Adagrad),
        (ADAM, torch.optim.Adam),
        (ADAM | {"epsilon": 0.01, "beta1": 0.5}, torch.optim.Adam),
        (ADAM | {"amsgrad": True, "beta2": 0.6}, torch.optim.Adam),
        (ADAMW, torch.optim.AdamW),
        (ADAMW | {"amsgrad": True, "beta2": 0.6}, torch.optim.AdamW),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else None,
)
def test_agrees_with_torch(options: dict[str, Any], make: Any, decay: float) -> None:
    table = LocalTable.create("t", 17, scale=1.0, **options | {"weight_decay": decay})
    weights = torch.nn.Parameter(torch.from_numpy(table.pull([7])).double())
    names = {"epsilon": "eps", "initial_accumulator": "initial_accumulator_value"}
    given = {
        names.get(k, k): v
        for k, v in options.items()
        if k not in {"optimizer", "learning_rate", "beta1", "beta2", "weight_decay"}
    }
    if make in {torch.optim.Adam, torch.optim.AdamW}:
        given["betas"] = (options["beta1"], options["beta2"])
    optimizer = make([weights], lr=options["learning_rate"], weight_decay=decay, **given)
    rng = np.random.default_rng(0)
    for _ in range(20):
        grads = coarse(rng, 1, 17)
        table.push([7], grads)
        weights.grad = torch.from_numpy(grads).double()
        optimizer.step()
    np.testing.assert_allclose(table.pull([7]), weights.detach().numpy(), rtol=0, atol=2 * 20 * EPS)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1e6, 1e15])
@pytest.mark.parametrize("options", [*RULES[2:], SGD | {"clip_norm": 1.0}], ids=name_of)
def test_gradients_of_any_size(options: dict[str, Any], scale: float) -> None:
    if options is FTRL and scale < 1e-20:
        options = FTRL | {"beta": 1.0}  # the squares are 0 in float32 and would say nothing
    rng = np.random.default_rng(1)
    keys = list(range(20))
    table, reference = make_pair(5, options, keys)
    for _ in range(4):
        grads = (rng.standard_normal((20, 5)) * scale).astype(np.float32)
        table.push(keys, grads)
        reference.push(keys, grads)
    assert_follows(table, reference, 4)


@pytest.mark.parametrize("options", RULES[:-1], ids=name_of)
@pytest.mark.parametrize("guard", [{}, {"trust_ratio": True}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("epsilon", [None, 0.0])
def test_a_zero_gradient_changes_nothing(
    options: dict[str, Any], guard: dict[str, Any], epsilon: float | None
) -> None:
    if epsilon is not None and "epsilon" in options:
        options = options | {"epsilon": epsilon}
    table = LocalTable.create("t", 9, scale=1.0, **options, **guard)
    first = table.pull([3])
    for _ in range(3):
        table.push([3], np.zeros((1, 9), np.float32))
    np.testing.assert_array_equal(table.pull([3]), first)


extreme = st.one_of(
    st.floats(-(2.0**120), 2.0**120, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-23, -1e-20, 1e19, -2e19, 1e37, -1e37]),
)


@settings(max_examples=150)
@given(
    st.sampled_from([*CASES, *(r | {"epsilon": 0.0} for r in (ADAGRAD, ROWWISE, ADAM))]),
    st.lists(st.lists(extreme, min_size=3, max_size=3), min_size=1, max_size=3),
)
def test_no_finite_gradient_breaks_a_row(
    options: dict[str, Any], pushes: list[list[float]]
) -> None:
    table = LocalTable.create("t", 3, **options)
    for grad in pushes:
        table.push([1], np.array([grad], np.float32))
        assert np.isfinite(table.pull([1])).all()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_first_step_of_adam_is_the_learning_rate(amsgrad: bool) -> None:
    table = LocalTable.create("t", 7, **(ADAM | {"amsgrad": amsgrad, "initializer": "zeros"}))
    grads = np.array([[1e-3, -1e-3, 1.0, -50.0, 1e6, -1e15, 1e30]], np.float32)
    table.push([1], grads)
    np.testing.assert_allclose(table.pull([1]), -0.05 * np.sign(grads), rtol=3e-5)


def test_a_schedule_multiplies_the_learning_rate() -> None:
    rng = np.random.default_rng(5)
    keys = list(range(8))
    for options in RULES[:-1]:
        scheduled = LocalTable.create("a", 4, **options)
        plain = LocalTable.create("b", 4, **(options | {"learning_rate": 0.25}))
        for _ in range(3):
            grads = coarse(rng, 8, 4)
            scheduled.push(keys, grads, rate=0.25 / options["learning_rate"])
            plain.push(keys, grads)
        np.testing.assert_allclose(scheduled.pull(keys), plain.pull(keys), rtol=0, atol=16 * EPS)


def test_ftrl_without_penalties_is_adagrad_under_any_schedule() -> None:
    rng = np.random.default_rng(6)
    keys = list(range(8))
    ftrl = LocalTable.create("t", 5, scale=1.0, **FTRL)
    adagrad = LocalTable.create("t", 5, scale=1.0, **(ADAGRAD | {"epsilon": 0.0}))
    for rate in (1.0, 0.5, 2.0, 0.0, 0.25):
        grads = coarse(rng, 8, 5)
        grads[grads == 0] = 1
        ftrl.push(keys, grads, rate=rate)
        adagrad.push(keys, grads, rate=rate)
    np.testing.assert_allclose(ftrl.pull(keys), adagrad.pull(keys), rtol=0, atol=64 * EPS)


def test_l1_gives_exact_zeros() -> None:
    table = LocalTable.create("t", 4, **(FTRL | {"l1": 1.0, "beta": 1.0, "initializer": "zeros"}))
    for _ in range(3):
        table.push([1], np.array([[0.3, -0.3, 0.5, -0.5]], np.float32))
    # z is the sum of the gradients while the weights are 0: 0.9, then 1.5.
    expected = 0.1 * (1.5 - 1.0) / (1 + np.sqrt(0.75))
    got = table.pull([1])[0]
    assert got[0] == 0
    assert got[1] == 0
    np.testing.assert_allclose(got[2:], [-expected, expected], rtol=16 * EPS)


@settings(max_examples=60)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=7, max_size=7))
def test_a_clipped_gradient_keeps_its_direction(values: list[float]) -> None:
    options = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
    grad = np.array([values], np.float32)
    norm = float(np.linalg.norm(grad.astype(np.float64)))
    clipped, plain = (LocalTable.create("t", 7, clip_norm=c, **options) for c in (2.0, 0.0))
    clipped.push([1], grad)
    plain.push([1], grad)
    if norm <= 2:
        np.testing.assert_array_equal(clipped.pull([1]), plain.pull([1]))
    else:
        expected = -grad.astype(np.float64) * (2 / norm)
        np.testing.assert_allclose(clipped.pull([1]), expected, rtol=4 * EPS, atol=1e-37)


def test_the_trust_ratio_makes_steps_in_proportion_to_the_weights() -> None:
    keys = list(range(200))
    grads = coarse(np.random.default_rng(7), 200, 16)
    for options in RULES[:-1]:
        table = LocalTable.create("t", 16, scale=3.0, trust_ratio=True, **options)
        before = table.pull(keys)
        table.push(keys, grads)
        length = np.linalg.norm(table.pull(keys) - before, axis=1)
        expected = options["learning_rate"] * np.linalg.norm(before, axis=1)
        np.testing.assert_allclose(length, expected, rtol=1e-4)
        # Weights of zero have no norm to go by: a plain step.
        zeros = [
            LocalTable.create("t", 16, initializer="zeros", trust_ratio=t, **options)
            for t in (True, False)
        ]
        for each in zeros:
            each.push(keys, grads)
        np.testing.assert_allclose(zeros[0].pull(keys), zeros[1].pull(keys), rtol=4 * EPS)
