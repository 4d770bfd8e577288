"""States of iterables as JSON: just what they were, whatever they hold."""

import json
import math
import random

import numpy as np
import pytest
import torch

from workers.data.own.states import decoded, encoded


def same(one, other):
    """Whether two values are equal, to the bit and in their types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        left, right = (
            each.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)
        )
        return torch.equal(left, right)
    return one == other or (one != one and other != other)


def through(state):
    return decoded(json.loads(json.dumps(encoded(state))))


STATES = {
    "plain": {"at": 5, "deep": [1, {"a": None, "b": [True, 0.1, "ü\ud800"]}], "": -(2**70)},
    "floats": [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308],
    "keys": {0: "a", "0": "b", (1, 2): {True: 3}, None: 4},
    "tagged": {"__heterps__": ["tensor", ["float32", [1], ""]], "x": 1},
    "bytes": [b"", b"\x00\xff", bytearray(b"a"), {1, 2}, frozenset("a"), ()],
    "python": random.Random(3).getstate(),
    "pcg": np.random.default_rng(3).bit_generator.state,
    "mt": np.random.RandomState(3).get_state(),
    "mt dict": np.random.Generator(np.random.MT19937(3)).bit_generator.state,
    "philox": np.random.Generator(np.random.Philox(3)).bit_generator.state,
    "torch": {"generator": torch.Generator().manual_seed(3).get_state()},
    "tensors": [
        torch.arange(6.0).view(2, 3).T,
        torch.tensor(math.nan, dtype=torch.bfloat16),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor(2**63 - 1),
        torch.ones(3, dtype=torch.float8_e5m2),
    ],
    "arrays": [
        np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
        np.array(1.5),
        np.zeros((0, 2), np.float16),
        np.array(["2024-01-01"], "M8[D]"),
        np.float32(0.1),
        np.int64(-5),
        np.bool_(True),
        np.array([2**64 - 1], np.uint64),
    ],
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was(name):
    assert same(through(STATES[name]), STATES[name])


def test_what_is_restored_draws_the_same_and_may_be_written_to():
    one = np.random.default_rng(5)
    one.random(7)
    other = np.random.default_rng()
    other.bit_generator.state = through(one.bit_generator.state)
    assert (one.random(9) == other.random(9)).all()
    for found in through([torch.zeros(2), np.zeros(2)]):
        found[:] = 1
        assert found.tolist() == [1, 1]


def test_a_state_that_changes_later_was_kept_as_it_was():
    state = {"rows": [1], "buffer": torch.zeros(2), "array": np.zeros(2)}
    kept = encoded(state)
    state["rows"].append(2)
    state["buffer"] += 1
    state["array"] += 1
    assert same(decoded(kept), {"rows": [1], "buffer": torch.zeros(2), "array": np.zeros(2)})


class Own:
    pass


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"a": [0, Own()]}, r"state\['a'\]\[1\] is of type .*Own"),
        ({Own(): 1}, "a key of state is of type .*Own"),
        (np.array([Own()]), "state is of type numpy.ndarray"),
        (torch.zeros(2).to_sparse(), "state is of type torch.Tensor"),
        (torch.nn.Parameter(torch.zeros(1)), "Parameter"),
    ],
)
def test_what_cannot_be_kept_is_named(state, expected):
    with pytest.raises(TypeError, match=expected):
        encoded(state)


@pytest.mark.parametrize(
    "found",
    [
        ["object", []],
        ["array", ["|O", [1], "AAAAAAAAAAA="]],
        ["tensor", ["load", [1], "AAAA"]],
        ["array", ["<f4", [3], "AAAA"]],
    ],
)
def test_nothing_but_values_is_made(found):
    with pytest.raises(ValueError, match=r"."):
        decoded({"__heterps__": found})
