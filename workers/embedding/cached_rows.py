"""`CachedRows`: a table of the parameter servers whose hot rows stay on a device.

Hits are read from the device, misses are pulled; gradients go back. Two ways to keep the rows
here true:
    through (learning_rate None): every gradient is pushed at once, and the rows here that it
        changed are pulled again in the background. For any optimizer of the table.
    back (a learning rate): the table's optimizer is plain SGD, so steps add up: they are taken
        here, and their gradients' sum is pushed when a row gives way or on `flush`. Between
        flushes other workers see older rows.
With "back", weight decay and clipping on the servers would see sums: use neither.
"""

from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ps import ParameterClient
from workers.ops.row_cache import Policy, RowCache

Rows = NDArray[np.float32]


class CachedRows:
    """Rows of one table, through a cache; for one thread.

    Args:
        client: of the servers.
        table: its name.
        dim: floats a row.
        capacity: rows to keep.
        ways: slots of a set, 1 to 32.
        policy: lru | lfu.
        device: where the rows lie.
        learning_rate: of the table's SGD, to take steps here; None to push through.

    Attributes:
        cache: with its counters `hits` and `misses`.
        written_back: rows whose gradients were pushed later than they came.
    """

    def __init__(
        self,
        client: ParameterClient,
        table: str,
        dim: int,
        capacity: int,
        *,
        ways: int = 32,
        policy: Policy = "lru",
        device: str | torch.device = "cpu",
        learning_rate: float | None = None,
    ) -> None:
        if learning_rate is not None and not learning_rate > 0:
            raise ValueError(f"CachedRows: learning_rate: expected above 0, got {learning_rate}")
        self.client, self.table, self.dim = client, table, dim
        self.cache = RowCache(capacity, dim, ways=ways, policy=policy, device=device)
        self.learning_rate = learning_rate
        self.written_back = 0
        slots = len(self.cache.rows)
        # Sums of gradients not yet pushed, and which rows have one.
        self._sums = torch.zeros_like(self.cache.rows) if learning_rate is not None else None
        self._dirty = torch.zeros(slots, dtype=torch.bool, device=self.cache.rows.device)
        self._ahead: tuple[Tensor, Future[Rows]] | None = None
        self._refresh: tuple[Tensor, Future[Rows]] | None = None
        on_gpu = self.cache.rows.is_cuda
        self._stream = torch.cuda.Stream(self.cache.rows.device) if on_gpu else None

    def prefetch(self, keys: Tensor) -> None:
        """Begins to pull those keys int64 [N] that are not here; the next `pull` takes them."""
        distinct = keys.to(self.cache.rows.device).unique()
        self._finish_refresh()
        held, _ = self.cache.held()
        missing = distinct[~torch.isin(distinct, held)].cpu()
        if len(missing):
            self._ahead = (missing, self.client.pull_async(self.table, missing.numpy()))

    def pull(self, keys: Tensor) -> Tensor:
        """The rows [N, dim] of keys int64 [N], which may repeat; on the cache's device."""
        cache = self.cache
        distinct, inverse = keys.to(cache.rows.device).unique(return_inverse=True)
        self._finish_refresh()
        cache.advance()
        slots = cache.find(distinct)
        absent = slots < 0
        missing = distinct[absent]
        if len(missing) == 0:
            return cache.rows[slots][inverse]
        admitted = cache.admit(missing)
        self._write_back(admitted.evicted_keys, admitted.evicted_slots)
        fetched = self._fetch(missing.cpu())
        kept = admitted.slots >= 0
        cache.rows[admitted.slots[kept]] = fetched[kept]
        rows = cache.rows[slots.clamp(min=0)]
        rows[absent] = fetched
        return rows[inverse]

    def push(self, keys: Tensor, grads: Tensor) -> None:
        """Applies gradients [N, dim] of keys int64 [N]; those of a repeated key add up."""
        cache = self.cache
        distinct, inverse = keys.to(cache.rows.device).unique(return_inverse=True)
        grads = grads.detach().to(cache.rows.device, torch.float32)
        total = grads.new_zeros((len(distinct), self.dim)).index_add(0, inverse, grads)
        self._finish_refresh()
        held, where = cache.held()
        order = held.argsort()
        place = torch.searchsorted(held[order], distinct).clamp(max=max(0, len(held) - 1))
        here = held[order][place] == distinct if len(held) else torch.zeros_like(distinct).bool()
        if self._sums is None or self.learning_rate is None:
            self._push(distinct, total)
            mine = distinct[here].cpu()
            if len(mine):
                future = self.client.pull_async(self.table, mine.numpy())
                self._refresh = (where[order][place[here]], future)
            return
        slots = where[order][place[here]]
        self._sums[slots] += total[here]
        self._dirty[slots] = True
        cache.rows[slots] -= self.learning_rate * total[here]
        self._push(distinct[~here], total[~here])

    def flush(self) -> None:
        """Pushes what is held back, and waits until the servers have applied it."""
        self._finish_refresh()
        slots = self._dirty.nonzero().flatten()
        self._write_back(self.cache.keys[slots], slots)
        self.client.flush()

    def close(self) -> None:
        """Flushes and forgets the rows; the client stays open."""
        self.flush()
        self._ahead = None
        self.cache.clear()

    def __enter__(self) -> "CachedRows":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()

    def _write_back(self, keys: Tensor, slots: Tensor) -> None:
        """Pushes the sums of slots that have one; `keys` are those that lay there."""
        if self._sums is None:
            return
        dirty = self._dirty[slots]
        keys, slots = keys[dirty], slots[dirty]
        if len(keys) == 0:
            return
        self._push(keys, self._sums[slots])
        self._sums[slots] = 0
        self._dirty[slots] = False
        self.written_back += len(keys)

    def _push(self, keys: Tensor, grads: Tensor) -> None:
        if len(keys) == 0:
            return
        host = keys.cpu()
        if self._ahead is not None and bool(torch.isin(self._ahead[0], host).any()):
            self._ahead = None  # pulled before this gradient
        self.client.push(self.table, host.numpy(), grads.cpu().numpy())

    def _fetch(self, keys: Tensor) -> Tensor:
        """The rows of distinct ascending keys, from what was pulled ahead as far as it goes."""
        rows = torch.empty(len(keys), self.dim)
        ready = torch.zeros(len(keys), dtype=torch.bool)
        if self._ahead is not None:
            ahead, future = self._ahead
            self._ahead = None
            ready = torch.isin(keys, ahead)
            pulled = torch.from_numpy(np.array(future.result()))
            rows[ready] = pulled[torch.searchsorted(ahead, keys[ready])]
        rest = keys[~ready]
        if len(rest):
            rows[~ready] = torch.from_numpy(np.array(self.client.pull(self.table, rest.numpy())))
        return self._to_device(rows)

    def _to_device(self, rows: Tensor) -> Tensor:
        """On a GPU by a stream of its own from pinned memory, which the current one waits for."""
        if self._stream is None:
            return rows
        current = torch.cuda.current_stream(self.cache.rows.device)
        with torch.cuda.stream(self._stream):
            there = rows.pin_memory().to(self.cache.rows.device, non_blocking=True)
        current.wait_stream(self._stream)
        there.record_stream(current)
        return there

    def _finish_refresh(self) -> None:
        """Puts the rows in place that were pulled again after a push."""
        if self._refresh is None:
            return
        slots, future = self._refresh
        self._refresh = None
        self.cache.rows[slots] = self._to_device(torch.from_numpy(np.array(future.result())))


def counters(rows: CachedRows) -> dict[str, Any]:
    """Hits, misses and rows written back so far, to log or plot."""
    return {
        "hits": rows.cache.hits,
        "misses": rows.cache.misses,
        "written_back": rows.written_back,
    }
