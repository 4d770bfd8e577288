"""An embedding whose rows live in a table, on the parameter servers or in this process."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ps import LocalTable
from ps.engine import _native as native
from ps.table.spec import make_spec


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """What a table needs to know: the same fields that `create_table` takes."""

    table: str
    dim: int
    optimizer: str = "adagrad"
    learning_rate: float = 0.05
    weight_decay: float = 0.0
    initial_accumulator: float | None = None
    initializer: str = "uniform"
    scale: float = 0.01
    seed: int = 0
    momentum: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        if self.initial_accumulator is None and self.optimizer == "adagrad":
            object.__setattr__(self, "initial_accumulator", 0.1)
        make_spec(self.table, **self.table_options())

    def table_options(self) -> dict[str, Any]:
        """Keyword arguments of `create_table`, the name aside."""
        options = asdict(self)
        del options["table"]
        betas, options["epsilon"] = options.pop("betas"), options.pop("eps")
        if betas is not None:
            options["beta1"], options["beta2"] = betas
        return {key: value for key, value in options.items() if value is not None}


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
    the rows of each micro-batch before it runs. Unbound, as in a notebook, the table lives in
    this process and takes its gradients during backward.

    Args:
        table: the table's name; layers that name the same table share rows.
        dim: values a row.
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

    Raises:
        TableError: a setting out of range, or one that the optimizer does not have.
    """

    def __init__(self, table: str, dim: int, **options: Any) -> None:
        super().__init__()
        self.spec = EmbeddingSpec(table, dim, **options)
        self.store: RowStore | None = None
        self.remote = False  # its rows live elsewhere: never make any here
        self._bound: BoundRows | None = None

    def bind(self, rows: Tensor, inverse: Tensor) -> None:
        """Serve the next forward from `rows` [U, dim] at positions `inverse` [number of keys]."""
        bind_rows([self], rows, inverse)

    def forward(self, keys: Tensor) -> Tensor:
        """Rows [*keys.shape, dim] float32 of int64 keys, on the keys' device."""
        if self._bound is not None:
            rows, inverse = self._bound.rows, self._bound.take(keys.numel())
        else:
            rows, inverse = self._own_rows(keys)
        values = gather_rows(rows, inverse)
        return values.view(*keys.shape, self.spec.dim)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.spec.table!r}, dim={self.spec.dim}, optimizer={self.spec.optimizer!r}"

    def _own_rows(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        if self.remote:
            raise RuntimeError(f"no rows were bound for table {self.spec.table!r}")
        if self.store is None:
            self.store = LocalTable.create(self.spec.table, **self.spec.table_options())
        store = self.store
        distinct, inverse = native.unique(keys.detach().reshape(-1).contiguous().cpu().numpy())
        learning = torch.is_grad_enabled() and self.training
        rows = torch.from_numpy(store.pull(distinct, not learning)).to(keys.device)
        if learning:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(
                lambda r: store.push(distinct, r.grad.cpu().numpy())
            )
        return rows, torch.from_numpy(inverse).to(keys.device)


class BoundRows:
    """Rows of a table for one forward of all layers that use it.

    Args:
        rows: [U, dim].
        inverse: positions in `rows` of the keys, in the order in which they are looked up.
    """

    def __init__(self, rows: Tensor, inverse: Tensor) -> None:
        self.rows = rows
        self._inverse = inverse
        self._taken = 0

    def take(self, count: int) -> Tensor:
        """Positions of the next `count` keys.

        Raises:
            RuntimeError: they were not bound.
        """
        first, self._taken = self._taken, self._taken + count
        if self._taken > len(self._inverse):
            raise RuntimeError(
                f"rows were bound for {len(self._inverse)} keys, and {self._taken} are looked up"
            )
        return self._inverse[first : self._taken]


def bind_rows(layers: Sequence[SparseEmbedding], rows: Tensor, inverse: Tensor) -> None:
    """Serve the next forward of a table's layers together.

    Args:
        layers: all that look up in the table.
        rows: [U, dim].
        inverse: positions in `rows` of the keys of all lookups, in the order of the calls.
    """
    bound = BoundRows(rows, inverse)
    for layer in layers:
        layer._bound = bound


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
