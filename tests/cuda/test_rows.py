"""What works on rows of tables, against plain torch and Python, on each device that is present."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workers import ops
from workers.ops import embedding, quantize
from workers.ops.row_cache import RowCache

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
# (rows of the table, width, sizes of bags): none, one, all one id, empty bags, ids over parts.
CASES = [(5, 3, []), (5, 3, [0]), (1, 1, [1]), (1, 7, [9, 0, 3]), (40, 33, [0, 2, 5, 0, 1, 300])]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU, or a torch without CUDA")
    return str(request.param)


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


def test_embedding_opcheck(device: str) -> None:
    table, ids, offsets, weights, direction = case((5, 3, [2, 0, 4]), device)
    torch.library.opcheck(embedding._pool, (table, ids, offsets, weights))
    torch.library.opcheck(embedding._segments, (direction, ids, offsets, None, 5))
    state = torch.zeros(5, device=device)
    step = (table, state, direction, ids, offsets, weights, "rowwise_adagrad", 0.1, 1e-8)
    torch.library.opcheck(embedding._update, step)


def test_writes_its_outputs_alone() -> None:
    from workers.ops import _ops

    table, ids, offsets, weights, direction = case((5, 3, [2, 0, 4]), "cpu")
    ordered, source = ids.sort(stable=True)
    bags = embedding._bags(ids, offsets)
    shapes = [(3, 3), (6, 3), (5, 3), (5,), (5,), (5, 3)]
    buffers = [torch.full((torch.Size(shape).numel() + 32,), 77.0) for shape in shapes]
    views = [b[16:-16].view(s) for b, s in zip(buffers, shapes, strict=True)]
    out, rows, changed, state, scales, back = views
    bytes_ = torch.full((15 + 32,), 77, dtype=torch.int8)
    changed.copy_(table)
    state.zero_()
    _ops.embedding_pool(table, ids, offsets, weights, out)
    _ops.embedding_segments(direction, ordered, source, bags, weights, 5, rows)
    _ops.embedding_update(direction, ordered, source, bags, None, 2, 0.1, 1e-8, changed, state)
    _ops.quantize_rows(table, bytes_[16:-16].view(5, 3), scales)
    _ops.dequantize_rows(bytes_[16:-16].view(5, 3), scales, back)
    for buffer in (*buffers, bytes_):
        assert (buffer[:16] == 77).all()
        assert (buffer[-16:] == 77).all()
    for view in views:
        assert not (view == 77).any()


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


def test_quantize_rows(device: str) -> None:
    x = torch.randn(37, 19, generator=torch.Generator().manual_seed(0)).to(device)
    x[3] = 0
    x[4, 2] = float("nan")
    x[5, 1] = float("inf")
    x[6] = 1e-45
    x[7] *= 1e30
    values, scales = ops.quantize_rows(x)
    back = ops.dequantize_rows(values, scales)
    assert back[[4, 5]].isnan().all()
    assert (back[[3, 6]] == 0).all()
    good = [r for r in range(37) if r not in (4, 5)]
    error = (back[good] - x[good]).abs().amax(1)
    assert (error <= x[good].abs().amax(1) / 254 * 1.001 + 1e-44).all()
    assert values[0].abs().max() == 127
    half, none = ops.quantize_rows(x[7:] * 1e5, "float16")
    assert none.numel() == 0
    assert torch.equal(half, (x[7:] * 1e5).clamp(-65504, 65504).half())
    assert torch.equal(ops.dequantize_rows(half, none), half.float())
    for empty in (x[:0], x[:, :0]):
        assert ops.dequantize_rows(*ops.quantize_rows(empty)).shape == empty.shape


def test_quantize_opcheck_and_refusals(device: str) -> None:
    x = torch.randn(3, 5, device=device)
    for form in quantize.FORMATS:
        torch.library.opcheck(quantize._quantize_rows, (x, form))
        torch.library.opcheck(quantize._dequantize_rows, quantize._quantize_rows(x, form))
    with pytest.raises(ValueError, match="form: expected int8 or float16, got int4"):
        ops.quantize_rows(x, "int4")
    with pytest.raises(ValueError, match="x: expected float32"):
        ops.quantize_rows(x.double())


class Plain:
    """A cache of the same rules, in plain Python."""

    def __init__(self, cache: RowCache) -> None:
        self.cache = cache
        self.slots: dict[int, list[int]] = {}  # slot -> [key, used, score]

    def find(self, key: int) -> int:
        for slot, entry in self.slots.items():
            if entry[0] == key:
                entry[1] = self.cache.tick
                entry[2] = entry[2] + 1 if self.cache.lfu else self.cache.tick
                return slot
        return -1

    def admit(self, key: int, first: int) -> int:
        lowest = -1
        for slot in range(first, first + self.cache.ways):
            entry = self.slots.get(slot)
            if entry is None:
                lowest = slot
                break
            if entry[1] != self.cache.tick and (lowest < 0 or entry[2] < self.slots[lowest][2]):
                lowest = slot
        if lowest >= 0:
            self.slots[lowest] = [key, self.cache.tick, 1 if self.cache.lfu else self.cache.tick]
        return lowest


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize(("capacity", "ways"), [(1, 1), (12, 4), (64, 32)])
def test_row_cache_keeps_its_rules(device: str, policy: Any, capacity: int, ways: int) -> None:
    from workers.ops import _ops

    cache = RowCache(capacity, 2, ways=ways, policy=policy, device=device)
    plain, generator = Plain(cache), torch.Generator().manual_seed(capacity)
    for _ in range(30):
        cache.advance()
        keys = (torch.randn(20, generator=generator) * 20).long().unique()
        slots = cache.find(keys.to(device)).cpu()
        assert slots.tolist() == [plain.find(key) for key in keys.tolist()]
        missing = keys[slots < 0]
        sets = torch.empty_like(missing)
        _ops.row_cache_set(missing, cache.sets, sets)
        admitted = cache.admit(missing.to(device))
        before = {slot: entry[0] for slot, entry in plain.slots.items()}
        pairs = zip(missing.tolist(), sets.tolist(), strict=True)
        expected = [plain.admit(key, first * ways) for key, first in pairs]
        assert admitted.slots.tolist() == expected
        gone = {slot: key for slot, key in before.items() if plain.slots[slot][0] != key}
        got = zip(admitted.evicted_slots.tolist(), admitted.evicted_keys.tolist(), strict=True)
        assert dict(got) == gone
    assert cache.hits > 0
    assert cache.misses > 0
    keys, slots = cache.held()
    assert dict(zip(slots.tolist(), keys.tolist(), strict=True)) == {
        slot: entry[0] for slot, entry in plain.slots.items()
    }


def test_row_cache_refuses() -> None:
    for wrong, message in (
        ({"ways": 33}, "ways: expected 1 to 32, got 33"),
        ({"policy": "fifo"}, "policy: expected lru or lfu, got fifo"),
        ({"capacity": 0}, "capacity=0, dim=2: expected at least 1"),
        ({"device": "meta"}, "device: expected one with native kernels, got meta"),
    ):
        arguments: dict[str, Any] = {"capacity": 4, "dim": 2, **wrong}
        with pytest.raises(ValueError, match=message):
            RowCache(**arguments)
