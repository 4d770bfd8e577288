"""Pools and updates of embedding rows against plain torch, on each device that is present."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cuda.guarded import Guarded
from workers import ops
from workers.ops import _ops, embedding

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
# (rows of the table, width, sizes of bags): none, one, all one id, empty bags, ids over parts.
CASES = [(5, 3, []), (5, 3, [0]), (1, 1, [1]), (1, 7, [9, 0, 3]), (40, 33, [0, 2, 5, 0, 1, 300])]


def case(
    shape: tuple[int, int, list[int]], device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(table, ids, offsets, weights, direction)."""
    rows, dim, bags = shape
    generator = torch.Generator().manual_seed(dim)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    ids = torch.randint(rows, (sum(bags),), generator=generator)
    weights = torch.float64 if dtype == torch.float64 else torch.float32
    return (
        random(rows, dim).to(device, dtype),
        ids.to(device),
        torch.tensor([0, *bags]).cumsum(0).to(device),
        random(len(ids)).to(device, weights),
        random(len(bags), dim).to(device, dtype),
    )


def pooled(
    table: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: str
) -> Tensor:
    bounds = offsets.tolist()
    bags = []
    for begin, end in itertools.pairwise(bounds):
        rows = table[ids[begin:end]]
        if weights is not None:
            rows = rows * weights[begin:end, None]
        bags.append(rows.sum(0) / (max(1, end - begin) if mode == "mean" else 1))
    return torch.stack(bags) if bags else table[:0]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_embedding_pool(device: str, dtype: torch.dtype, mode: Any, weighted: bool) -> None:
    for shape in CASES:
        table, ids, offsets, weights, direction = case(shape, device, dtype)
        wide = [t.double().cpu().requires_grad_() for t in (table, weights)]
        inputs = [t.clone().requires_grad_() for t in (table, weights)]
        count = 2 if weighted else 1
        out = ops.embedding_pool(inputs[0], ids, offsets, inputs[1] if weighted else None, mode)
        expected = pooled(wide[0], ids.cpu(), offsets.cpu(), wide[1] if weighted else None, mode)
        got = torch.autograd.grad(out, inputs[:count], direction)
        want = torch.autograd.grad(
            expected, wide[:count], direction.double().cpu(), allow_unused=True
        )
        assert out.dtype == dtype
        assert got[0].is_sparse
        pairs = [
            (out, expected),
            (got[0].to_dense(), want[0]),
            *zip(got[1:], want[1:], strict=True),
        ]
        for mine, theirs in pairs:
            exact = torch.zeros_like(mine).double().cpu() if theirs is None else theirs
            scale = max(1.0, exact.abs().max().item() if exact.numel() else 1.0)
            torch.testing.assert_close(
                mine.double().cpu(), exact, rtol=0, atol=TOLERANCE[dtype] * scale
            )


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad"])
def test_embedding_update_equals_a_dense_step(device: str, rule: Any) -> None:
    for shape in CASES:
        table, ids, offsets, weights, direction = case(shape, device, torch.float64)
        exact = table.clone().requires_grad_()
        sizes = {"sgd": None, "adagrad": table.shape, "rowwise_adagrad": table.shape[:1]}
        size = sizes[rule]
        state = None if size is None else torch.full(size, 0.1, dtype=torch.float64, device=device)
        sums = None if state is None else state.clone()
        for _ in range(2):
            out = pooled(exact, ids, offsets, weights, "mean")
            (grad,) = torch.autograd.grad(out, exact, direction, materialize_grads=True)
            touched = torch.zeros(len(table), 1, dtype=torch.bool, device=device)
            touched[ids] = True
            step = grad
            if sums is not None:
                squares = grad.square()
                sums += squares.mean(1) if rule == "rowwise_adagrad" else squares
                root = sums.sqrt() + 1e-8
                step = grad / (root[:, None] if rule == "rowwise_adagrad" else root)
            exact = (exact - 0.5 * step * touched).detach().requires_grad_()
            ops.embedding_update(
                table, state, direction, ids, offsets, weights, "mean", rule=rule, rate=0.5
            )
        torch.testing.assert_close(table, exact.detach(), rtol=1e-12, atol=1e-12)
        if state is not None:
            torch.testing.assert_close(state, sums, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad"])
def test_rows_without_width_leave_a_state_of_numbers(device: str, rule: Any) -> None:
    table, ids, offsets, _, direction = case((4, 0, [2, 1]), device)
    sizes = {"sgd": None, "adagrad": table.shape, "rowwise_adagrad": table.shape[:1]}
    size = sizes[rule]
    state = None if size is None else torch.full(size, 0.1, device=device)
    ops.embedding_update(table, state, direction, ids, offsets, rule=rule, rate=0.5)
    assert state is None or (state == 0.1).all()


def test_embedding_gives_equal_bits_for_any_threads(device: str) -> None:
    table, ids, offsets, weights, direction = case((50, 65, [700, 0, 900]), device)
    threads = torch.get_num_threads()

    def run() -> list[Tensor]:
        changed, state = table.clone(), torch.zeros(50, device=device)
        ops.embedding_update(
            changed, state, direction, ids, offsets, rule="rowwise_adagrad", rate=0.1
        )
        rows = embedding._segments(direction, ids, offsets, weights, 50)
        return [ops.embedding_pool(table, ids, offsets, weights), changed, state, *rows]

    first = run()
    try:
        for count in (threads, 1, 3):
            torch.set_num_threads(count)
            assert all(map(torch.equal, first, run()))
    finally:
        torch.set_num_threads(threads)


def test_embedding_opcheck(native_device: str) -> None:
    table, ids, offsets, weights, direction = case((5, 3, [2, 0, 4]), native_device)
    torch.library.opcheck(embedding._pool.op, (table, ids, offsets, weights))
    torch.library.opcheck(embedding._segments.op, (direction, ids, offsets, None, 5))
    state = torch.zeros(5, device=native_device)
    step = (table, state, direction, ids, offsets, weights, "rowwise_adagrad", 0.1, 1e-8)
    torch.library.opcheck(embedding._update.op, step)


def test_writes_its_outputs_alone() -> None:
    table, ids, offsets, weights, direction = case((5, 3, [2, 0, 4]), "cpu")
    ordered, source = ids.sort(stable=True)
    bags = embedding._bags(ids, offsets)
    guarded = Guarded()
    out, rows = guarded.output(3, 3), guarded.output(6, 3)
    changed, state = guarded.output(5, 3), guarded.output(5)
    changed.copy_(table)
    state.zero_()
    _ops.embedding_pool(table, ids, offsets, weights, out)
    _ops.embedding_segments(direction, ordered, source, bags, weights, 5, rows)
    _ops.embedding_update(direction, ordered, source, bags, None, 2, 0.1, 1e-8, changed, state)
    guarded.check(all_written=True)


def test_embedding_equals_torch() -> None:
    table, ids, offsets, weights, _ = case(CASES[-1], "cpu")
    expected = F.embedding_bag(
        ids, table, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    torch.testing.assert_close(ops.embedding_pool(table, ids, offsets, weights), expected)


def test_embedding_refuses() -> None:
    table, ids, offsets = torch.zeros(4, 2), torch.tensor([0, 4]), torch.tensor([0, 2])
    with pytest.raises(IndexError, match="ids holds 4, expected 0 to 3"):
        ops.embedding_pool(table, ids, offsets)
    with pytest.raises(IndexError, match="offsets: expected to go from 0 to 2"):
        ops.embedding_pool(table, ids, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="mode: expected sum or mean, got max"):
        ops.embedding_pool(table, ids, offsets, mode="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state: expected torch.float32 \[4\], got none"):
        ops.embedding_update(
            table, None, torch.zeros(1, 2), ids, offsets, rule="rowwise_adagrad", rate=1
        )
