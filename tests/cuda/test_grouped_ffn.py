"""grouped_ffn against a loop over groups in float64, on each device that is present."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cuda.guarded import Guarded
from workers import ops
from workers.ops import _ops

# The package has a function of the same name.
module = importlib.import_module("workers.ops.grouped_ffn")

# Sizes of groups: none, one row, one group, all in one, some empty, 4 of 16 with 20 % each.
GROUPS = [
    [0],
    [1],
    [37],
    [0, 0, 53, 0],
    [3, 0, 9, 1, 0, 26],
    [40, 3, 4, 40, 3, 3, 4, 3, 40, 3, 3, 4, 3, 40, 3, 4],
]
WIDTHS = [(1, 1), (7, 13), (16, 32), (33, 65)]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}


def case(
    counts: list[int],
    dim: int,
    hidden: int,
    activation: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, offsets, w1, w2), those of floats to be differentiated."""
    generator = torch.Generator().manual_seed(len(counts) * 1000 + dim)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        return values.to(device, dtype).requires_grad_()

    inner = 2 * hidden if activation == "swiglu" else hidden
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device)
    return (
        random(sum(counts), dim),
        offsets,
        random(len(counts), dim, inner, scale=dim**-0.5),
        random(len(counts), hidden, dim, scale=hidden**-0.5),
    )


def activate(pre: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        gate, value = pre.chunk(2, dim=-1)
        return F.silu(gate) * value
    function: Any = getattr(F, activation)
    return function(pre)


def reference(rows: Tensor, offsets: Tensor, w1: Tensor, w2: Tensor, activation: str) -> Tensor:
    bounds = offsets.tolist()
    parts = [
        activate(rows[bounds[e] : bounds[e + 1]] @ w1[e], activation) @ w2[e]
        for e in range(len(w1))
    ]
    return torch.cat(parts)


def check(counts: list[int], dim: int, hidden: int, activation: str, **kind: Any) -> None:
    """The output and every gradient."""
    rows, offsets, w1, w2 = inputs = case(counts, dim, hidden, activation, **kind)
    wide = [t.detach().double().cpu().requires_grad_(t.requires_grad) for t in inputs[:1]]
    wide += [t.detach().double().cpu().requires_grad_() for t in (w1, w2)]
    out = ops.grouped_ffn(rows, offsets, w1, w2, activation)
    expected = reference(wide[0], offsets.cpu(), wide[1], wide[2], activation)
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    got = torch.autograd.grad(out, (rows, w1, w2), direction.to(out.device, out.dtype))
    want = torch.autograd.grad(expected, wide, direction)
    assert out.dtype == rows.dtype
    for mine, theirs in zip([out, *got], [expected, *want], strict=True):
        scale = max(1.0, theirs.abs().max().item() if theirs.numel() else 1.0)
        tolerance = TOLERANCE[rows.dtype] * scale
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("activation", module.ACTIVATIONS)
@pytest.mark.parametrize("counts", GROUPS, ids=str)
def test_equals_a_loop(device: str, counts: list[int], activation: str) -> None:
    for dim, hidden in WIDTHS:
        check(counts, dim, hidden, activation, device=device)


@pytest.mark.parametrize("activation", module.ACTIVATIONS)
def test_activations_far_from_zero(device: str, activation: str) -> None:
    far = [9.0, 13.0, 59.0, 61.0, 87.0, 89.0, 1e4, 1e12, 1e30]
    values = torch.tensor([float("nan"), -0.0, 1e-30, *far, *(-x for x in far)])
    one = torch.ones(1, 1, 1)
    w1 = torch.tensor([[[1.0, 0.5]]]) if activation == "swiglu" else one
    rows = values[:, None].to(device).requires_grad_()
    offsets = torch.tensor([0, len(values)], device=device)
    out = ops.grouped_ffn(rows, offsets, w1.to(device), one.to(device), activation)
    out.sum().backward()
    exact = values[:, None].double().requires_grad_()
    wanted = module.activate(exact @ w1[0].double(), activation)
    wanted.sum().backward()
    assert rows.grad is not None
    # What is no number has a gradient of no use, which is 0 here and 1 there for relu.
    for got, right in ((out, wanted), (rows.grad[1:], exact.grad[1:])):
        torch.testing.assert_close(got.cpu(), right.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(device: str, dtype: torch.dtype) -> None:
    for activation in module.ACTIVATIONS:
        check(GROUPS[-1], 24, 40, activation, dtype=dtype, device=device)
        check(GROUPS[4], 9, 11, activation, dtype=dtype, device=device)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=6),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(module.ACTIVATIONS),
)
@settings(max_examples=40)
def test_any_shape(counts: list[int], dim: int, hidden: int, activation: str) -> None:
    check(counts, dim, hidden, activation)


def test_sums_longer_than_a_panel() -> None:
    # 256 rows are packed at a time: the depth of all six products goes beyond.
    check([600, 5], 300, 270, "swiglu")
    check([300], 270, 300, "gelu", dtype=torch.bfloat16)


def test_gradcheck(device: str) -> None:
    for activation in module.ACTIVATIONS:
        rows, offsets, w1, w2 = case([2, 0, 3], 3, 4, activation, torch.float64, device)

        def function(
            rows: Tensor,
            w1: Tensor,
            w2: Tensor,
            offsets: Tensor = offsets,
            activation: str = activation,
        ) -> Tensor:
            return ops.grouped_ffn(rows, offsets, w1, w2, activation)

        assert torch.autograd.gradcheck(function, (rows, w1, w2))


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_gradients_of_some_inputs(device: str, wanted: tuple[bool, ...]) -> None:
    rows, offsets, w1, w2 = case([4, 0, 3], 5, 6, "swiglu", device=device)
    inputs = (rows, w1, w2)
    every = torch.autograd.grad(ops.grouped_ffn(rows, offsets, w1, w2, "swiglu").sum(), inputs)
    for tensor, requires in zip(inputs, wanted, strict=True):
        tensor.requires_grad_(requires)
    ops.grouped_ffn(rows, offsets, w1, w2, "swiglu").sum().backward()
    for tensor, gradient, requires in zip(inputs, every, wanted, strict=True):
        assert (tensor.grad is not None) == requires
        if tensor.grad is not None:
            assert torch.equal(tensor.grad, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(native_device: str, dtype: torch.dtype) -> None:
    inputs = case([2, 0, 3], 4, 6, "swiglu", dtype, native_device)
    torch.library.opcheck(module._grouped_ffn.op, (*inputs, "swiglu", True))
    plain = [tensor.detach() for tensor in inputs]
    torch.library.opcheck(module._grouped_ffn.op, (*plain, "swiglu", False))
    rows, offsets, w1, w2 = plain
    pre = module._grouped_ffn(*plain, "swiglu", True)[1]
    backward = (torch.ones_like(rows), rows, offsets, pre, w1, w2, "swiglu", True, True)
    torch.library.opcheck(module._grouped_ffn_backward.op, backward)


def test_compiles_as_one_graph(device: str) -> None:
    inputs = case([2, 0, 3], 4, 6, "gelu", device=device)
    compiled = torch.compile(ops.grouped_ffn, backend="aot_eager", fullgraph=True)
    out, expected = compiled(*inputs), ops.grouped_ffn(*inputs)
    assert torch.equal(out, expected)
    (got,) = torch.autograd.grad(out.sum(), inputs[2])
    (want,) = torch.autograd.grad(expected.sum(), inputs[2])
    assert torch.equal(got, want)


def test_equal_bits_on_every_run_and_number_of_threads(native_device: str) -> None:
    rows, offsets, w1, w2 = case(GROUPS[-1], 33, 300, "swiglu", device=native_device)

    def run() -> tuple[Tensor, ...]:
        out = ops.grouped_ffn(rows, offsets, w1, w2, "swiglu")
        return out, *torch.autograd.grad(out.square().sum(), (rows, w1, w2))

    threads, first = torch.get_num_threads(), run()
    try:
        for count in (threads, 1, 3):
            torch.set_num_threads(count)
            assert all(map(torch.equal, first, run()))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_other_backends(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "grouped_mm" and module._grouped_mm() is None:
        pytest.skip("a torch without grouped_mm")
    dtype = torch.bfloat16 if backend == "grouped_mm" else torch.float32
    monkeypatch.setenv("HETERPS_GROUPED_FFN", backend)
    check([3, 0, 13], 16, 24, "swiglu", dtype=dtype, device=device)
    monkeypatch.setenv("HETERPS_GROUPED_FFN", "fastest")
    with pytest.raises(ValueError, match="HETERPS_GROUPED_FFN=fastest: expected one of native"):
        ops.grouped_ffn(*case([3], 4, 4, "gelu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_way_of_hopper(
    dtype: torch.dtype, native_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_device == "emulated":
        monkeypatch.setenv("HETERPS_EMULATED_HOPPER", "1")
    rows, _, w1, w2 = case([3], 16, 24, "gelu", dtype, native_device)
    if native_device == "emulated":
        assert module._workspace(rows, w1, w2, "gelu") is not None
    for activation in module.ACTIVATIONS:
        check([0, 3, 0, 40, 1], 16, 24, activation, dtype=dtype, device=native_device)
        check(
            [0, 3, 0, 40, 1], 16, 20, activation, dtype=dtype, device=native_device
        )  # does not fit


def test_autocast_and_inference() -> None:
    rows, offsets, w1, w2 = case(GROUPS[4], 16, 32, "gelu")
    plain = ops.grouped_ffn(rows, offsets, w1, w2)
    with torch.no_grad():
        assert torch.equal(ops.grouped_ffn(rows, offsets, w1, w2), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.grouped_ffn(rows, offsets, w1, w2)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), plain, rtol=5e-2, atol=5e-2)


def test_writes_its_outputs_alone() -> None:
    counts, dim, hidden = [3, 0, 8], 5, 7
    rows, offsets, w1, w2 = (t.detach() for t in case(counts, dim, hidden, "swiglu"))
    total, inner = sum(counts), 2 * hidden
    shapes = [(total, dim), (total, inner), (total, dim), tuple(w1.shape), tuple(w2.shape)]
    guarded = Guarded()
    out, pre, grad_rows, grad_w1, grad_w2 = (guarded.output(*s) for s in shapes)
    _ops.grouped_ffn(rows, offsets, w1, w2, 3, out, pre, None)
    _ops.grouped_ffn_backward(
        out, rows, offsets, pre, w1, w2, 3, None, None, grad_rows, grad_w1, grad_w2
    )
    guarded.check(all_written=True)
    assert (grad_w1[1] == 0).all()


def test_refuses_what_does_not_fit() -> None:
    rows, offsets, w1, w2 = case([2, 3], 4, 6, "gelu")
    with pytest.raises(ValueError, match=r"w1: expected \[2, 4, 12\], got \[2, 4, 6\]"):
        ops.grouped_ffn(rows, offsets, w1, w2, "swiglu")
    with pytest.raises(ValueError, match=r"activation: expected one of gelu, .*got tanh"):
        ops.grouped_ffn(rows, offsets, w1, w2, "tanh")
    with pytest.raises(ValueError, match="expected rows, w1 and w2 of one dtype"):
        ops.grouped_ffn(rows, offsets, w1.double(), w2)
    for wrong in ([0, 2, 4], [0, 6, 5], [1, 2, 5]):
        with pytest.raises(IndexError, match="offsets: expected to ascend from 0 to 5"):
            ops.grouped_ffn(rows, torch.tensor(wrong), w1, w2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", module.ACTIVATIONS)
def test_matrices_in_places_give_the_bits_of_those_side_by_side(
    activation: str, dtype: torch.dtype
) -> None:
    counts, dim, hidden = GROUPS[-1], 24, 40
    rows, offsets, w1, w2 = (t.detach() for t in case(counts, dim, hidden, activation, dtype))
    expected = ops.grouped_ffn(rows, offsets, w1, w2, activation)
    first, second = w1[0].numel() * w1.itemsize, w2[0].numel() * w2.itemsize
    at = ops.FfnAt(w1=64, w2=128 + first, hidden=hidden, activation=activation)
    memory = torch.zeros(20, -(-(128 + first + second) // 64) * 64, dtype=torch.uint8)
    places = torch.randperm(20, generator=torch.Generator().manual_seed(0))[: len(counts)]
    for e, place in enumerate(places.tolist()):
        memory[place, 64 : 64 + first] = w1[e].contiguous().view(-1).view(torch.uint8)
        memory[place, 128 + first : 128 + first + second] = w2[e].view(-1).view(torch.uint8)
    out = torch.full_like(rows, 7)
    for turn in (0, 1):
        now = torch.where(torch.arange(len(counts)) % 2 == turn, places, -1)
        ops.grouped_ffn_at(rows, offsets, now, memory, at, out)
        for e in range(len(counts)):
            part = slice(int(offsets[e]), int(offsets[e + 1]))
            done = turn == 1 or e % 2 == 0
            want = expected[part] if done else torch.full_like(rows[part], 7)
            assert torch.equal(out[part], want)


def test_places_that_do_not_fit_are_refused() -> None:
    rows, offsets, w1, w2 = (t.detach() for t in case([2, 3], 8, 8, "relu"))
    memory, out = torch.zeros(3, 1024, dtype=torch.uint8), torch.empty_like(rows)
    size = w1[0].numel() * 4
    good = ops.FfnAt(0, size, 8, "relu")
    assert w2[0].numel() * 4 == size

    def run(places: list[int], at: ops.FfnAt = good, ends: Tensor = offsets) -> None:
        ops.grouped_ffn_at(rows, ends, torch.tensor(places), memory, at, out)

    run([0, 2])
    with pytest.raises(ValueError, match="places: expected numbers of places"):
        run([0, 3])
    for at in ((-4, size), (0, 1024 - size + 4), (2, size), (0, size + 2)):
        with pytest.raises(ValueError, match="expected to lie inside a place"):
            run([0, 1], ops.FfnAt(*at, 8, "relu"))
    with pytest.raises(ValueError, match="hidden"):
        run([0, 1], ops.FfnAt(0, size, -1, "relu"))
    with pytest.raises(IndexError, match="offsets"):
        run([0, 1], ends=torch.tensor([0, 9, 5]))
