"""An embedding whose rows live in a table, on the parameter servers or in this process."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ps import LocalTable
from ps.engine import _native as native
from workers.data.keys import PAD
from workers.embedding.spec import EmbeddingSpec

POOLINGS: Final = ("sum", "mean", "max")


class RowStore(Protocol):
    """Where rows come from and gradients go."""

    def pull(self, keys: NDArray[np.uint64], read_only: bool) -> NDArray[np.float32]:
        """Rows [n, dim] of distinct keys [n]."""
        ...

    def push(self, keys: NDArray[np.uint64], grads: NDArray[np.float32]) -> None:
        """Apply gradients [n, dim] to distinct keys [n]."""
        ...


class SparseEmbedding(nn.Module):
    """Rows of dimension `dim` for 64-bit keys, grown on first use.

    It holds no parameters: rows and their optimizer state belong to the table. A stage binds
    the rows of each micro-batch before it runs. Unbound, as in a notebook, the layer has a table
    of its own in this process, which takes the gradients of all lookups as a backward ends: a step
    of the optimizer for their rows.

    The key `heterps.PAD` stands for no key: it reads zeros, and has no row.

    Args:
        table: the table's name; layers that name the same table share rows.
        dim: values a row.
        pooling: sum | mean | max of the rows of a bag, over the last axis of the keys; PAD does not
            count, and an empty bag gives zeros. None: each key's own row.
        optimizer: sgd | momentum | adagrad | rowwise_adagrad | adam | adamw | ftrl, applied a row
            at a time where the row lives.
        learning_rate: of that optimizer.
        weight_decay: L2 penalty, of adamw decoupled, on the rows that a step touches.
        initial_accumulator: of adagrad, 0.1 unless given, and of rowwise_adagrad.
        momentum: of momentum.
        betas: of adam and adamw, two.
        eps: of adagrad, rowwise_adagrad, adam and adamw.
        initializer: zeros | uniform | normal, seeded by `seed` and the key.
        scale: half-width of the interval, or standard deviation.
        options: others of `EmbeddingSpec`: amsgrad, l1, l2, beta, clip_norm, bound, trust_ratio,
            segments, dtype, stochastic_rounding, admission, eviction, score, memory_bytes, as of
            `ps.table.spec.make_spec`; clicks and wire, which say how a job counts and sends.

    Raises:
        ValueError: another pooling.
        TableError: a setting out of range, or one that the optimizer does not have.
    """

    def __init__(self, table: str, dim: int, *, pooling: str | None = None, **options: Any) -> None:
        super().__init__()
        if pooling is not None and pooling not in POOLINGS:
            raise ValueError(
                f"table {table!r}: pooling={pooling!r}; expected {', '.join(POOLINGS)}, or None"
            )
        self.spec = EmbeddingSpec(table, dim, **options)
        self.pooling = pooling
        self.store: RowStore | None = None
        self.remote = False  # its rows live elsewhere: never make any here
        self._bound: BoundRows | None = None

    def bind(self, rows: Tensor, inverse: Tensor, *, padded: bool = False) -> None:
        """Serve the next forward of this layer alone; see `bind_rows`."""
        bind_rows([self], rows, inverse, padded=padded)

    def forward(self, keys: Tensor) -> Tensor:
        """Rows of int64 keys, on the keys' device.

        Returns:
            float32 [*keys.shape, dim]; with pooling [*keys.shape[:-1], dim].
        """
        if self.pooling is not None and keys.ndim < 2:
            raise ValueError(
                f"table {self.spec.table!r}: keys of shape {list(keys.shape)}; with "
                f"pooling={self.pooling!r} expected [samples, keys of a bag]"
            )
        if self._bound is not None:
            padded = self._bound.padded
            rows, inverse = self._bound.take(keys.numel())
        else:
            rows, inverse, padded = self._own_rows(keys)
        there = keys != PAD if padded else None
        pooling = self.pooling
        if pooling is not None and rows.device.type == "cpu" and len(rows) and keys.shape[-1]:
            bags = _Pool.apply(rows, inverse, there, keys.shape[-1], pooling)  # type: ignore[no-untyped-call]
            return bags.view(*keys.shape[:-1], self.spec.dim)  # type: ignore[no-any-return]
        values = _looked_up(rows, inverse, there).view(*keys.shape, self.spec.dim)
        return values if pooling is None else _pooled(values, there, pooling)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        shown = f"{self.spec.table!r}, dim={self.spec.dim}, optimizer={self.spec.optimizer!r}"
        return shown if self.pooling is None else f"{shown}, pooling={self.pooling!r}"

    def _own_rows(self, keys: Tensor) -> tuple[Tensor, Tensor, bool]:
        if self.remote:
            raise RuntimeError(f"there are no rows for table {self.spec.table!r}")
        if self.store is None:
            self.store = LocalTable.create(self.spec.table, **self.spec.table_options())
        store = self.store
        flat = keys.detach().reshape(-1).contiguous().cpu().numpy()
        distinct, inverse, there = unique_keys(flat)
        learning = torch.is_grad_enabled() and self.training
        rows = torch.from_numpy(store.pull(distinct, not learning)).to(keys.device)
        if learning:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(
                lambda r: _own.add(store, distinct, r.grad.cpu().numpy())
            )
        return rows, torch.from_numpy(inverse).to(keys.device), there is not None


class _OwnGradients:
    """Of the rows that lookups outside of a job got, by the backward that they are of."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[RowStore, NDArray[np.uint64], NDArray[np.float32]]]] = {}

    def add(self, store: RowStore, keys: NDArray[np.uint64], grads: NDArray[np.float32]) -> None:
        """Within a backward: have them pushed as it ends, with others of the same table."""
        task: int = torch._C._current_graph_task_id()
        if task not in self._of:
            self._of[task] = []
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._push(task))
        self._of[task].append((store, keys, grads))

    def _push(self, task: int) -> None:
        parts = self._of.pop(task)
        for store in {id(store): store for store, *_ in parts}.values():
            own = [(keys, grads) for other, keys, grads in parts if other is store]
            keys, inverse = native.unique(np.concatenate([keys for keys, _ in own]))
            grads = np.concatenate([grads for _, grads in own])
            store.push(keys, native.segment_sum(inverse, grads, len(keys), grads.shape[1]))


_own = _OwnGradients()


class BoundRows:
    """Rows of a table for one forward of all layers that use it.

    Args:
        rows: [U, dim].
        inverse: positions in `rows` of the keys, in the order in which they are looked up.
        padded: some of the keys are PAD.
        felt: told in a backward of the positions of each lookup that gets a gradient.
    """

    def __init__(
        self,
        rows: Tensor,
        inverse: Tensor,
        padded: bool,
        felt: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.padded = padded
        self._rows = rows
        self._inverse = inverse
        self._felt = felt
        self._taken = 0

    def take(self, count: int) -> tuple[Tensor, Tensor]:
        """The rows, and positions in them of the next `count` keys.

        Raises:
            RuntimeError: they were not bound.
        """
        first, self._taken = self._taken, self._taken + count
        if self._taken > len(self._inverse):
            raise RuntimeError(
                f"rows were bound for {len(self._inverse)} keys, and {self._taken} are looked up"
            )
        positions = self._inverse[first : self._taken]
        if (felt := self._felt) is None:
            return self._rows, positions
        own = self._rows.view_as(self._rows)  # by which gradients of this lookup alone come back
        if own.requires_grad:
            own.register_hook(lambda _: felt(positions))
        return own, positions


def bind_rows(
    layers: Sequence[SparseEmbedding],
    rows: Tensor,
    inverse: Tensor,
    *,
    padded: bool,
    felt: Callable[[Tensor], None] | None = None,
) -> None:
    """Serve the next forward of a table's layers together.

    Args:
        layers: all that look up in the table.
        rows: [U, dim].
        inverse: positions in `rows` of the keys of all lookups, in the order of the calls.
        padded: some of the keys are PAD, whose positions mean nothing.
        felt: told in a backward of the positions of each lookup that gets a gradient.
    """
    bound = BoundRows(rows, inverse, padded, felt)
    for layer in layers:
        layer._bound = bound


def unique_keys(
    keys: NDArray[np.int64],
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.bool_] | None]:
    """The keys [n] that have a row, each once.

    Returns:
        distinct keys [U]; positions in them [n], of PAD 0; and which of `keys` are not PAD, None
        where all are.
    """
    there = keys != PAD
    if there.all():
        distinct, inverse = native.unique(keys)
        return distinct, inverse, None
    inverse = np.zeros(len(keys), np.int64)
    distinct, inverse[there] = native.unique(keys[there])
    return distinct, inverse, there


def _looked_up(rows: Tensor, inverse: Tensor, there: Tensor | None) -> Tensor:
    """`rows[inverse]` [n, dim], zeros where a key is not `there`."""
    if there is None:
        return gather_rows(rows, inverse)
    if not len(rows):  # nothing to point at; the rows have part in the result all the same
        return rows.sum() * rows.new_zeros(len(inverse), rows.shape[1])
    return gather_rows(rows, inverse).where(there.reshape(-1, 1), 0.0)


def _pooled(values: Tensor, there: Tensor | None, pooling: str) -> Tensor:
    """Bags [..., L, dim] as one value each, [..., dim]; what is not `there` [..., L] is zero."""
    if pooling == "max":
        if not values.shape[-2]:
            return values.sum(-2)
        if there is None:
            return values.max(-2).values
        highest = values.where(there.unsqueeze(-1), -torch.inf).max(-2).values
        return highest.where(there.any(-1, keepdim=True), 0.0)
    summed = values.sum(-2)
    if pooling == "sum":
        return summed
    if there is None:
        return summed / max(1, values.shape[-2])
    return summed / there.sum(-1, keepdim=True).clamp(min=1)


def gather_rows(rows: Tensor, inverse: Tensor) -> Tensor:
    """`rows[inverse]` [n, dim], whose backward sums into `rows` without a pass per index."""
    if rows.device.type != "cpu":
        return nn.functional.embedding(inverse, rows)
    return _Gather.apply(rows, inverse)  # type: ignore[no-any-return,no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse  # type: ignore[attr-defined]
        ctx.count = rows.shape[0]  # type: ignore[attr-defined]
        return rows.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().numpy()
        summed = native.segment_sum(ctx.inverse.numpy(), grad, ctx.count, grad.shape[1])
        return torch.from_numpy(summed), None


class _Pool(torch.autograd.Function):
    """Bags of `length` keys without a copy of a row for each key, neither forward nor backward."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, inverse: Tensor, there: Tensor | None, length: int, pooling: str
    ) -> Tensor:
        ctx.inverse, ctx.length, ctx.pooling = inverse.numpy(), length, pooling
        ctx.there = None if there is None else there.reshape(-1).numpy()
        ctx.count, dim = rows.shape
        own = rows.detach().contiguous().numpy()
        bags, ctx.picked = native.pool(own, ctx.inverse, ctx.there, length, dim, pooling)
        return torch.from_numpy(bags)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad = grads[0].contiguous().numpy()
        summed = native.pool_grads(
            grad,
            ctx.inverse,
            ctx.there,
            ctx.picked,
            ctx.length,
            ctx.count,
            grad.shape[1],
            ctx.pooling,
        )
        return torch.from_numpy(summed), None, None, None, None


def tables_of(layers: Iterable[SparseEmbedding]) -> dict[str, EmbeddingSpec]:
    """The tables that some layers use, by name.

    Raises:
        ValueError: two layers name one table and disagree about it.
    """
    tables: dict[str, EmbeddingSpec] = {}
    for layer in layers:
        first = tables.setdefault(layer.spec.table, layer.spec)
        if first != layer.spec:
            raise ValueError(
                f"table {first.table!r} is described in two ways: {first} and {layer.spec}"
            )
    return tables
