"""Embedding rows of a stage, pulled ahead of need; in which order is `RowOrder`'s.

The first stage's rows of a step are pulled together, later stages' as each micro-batch arrives.
What they collect goes back by `workers/stage/commits.py`.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from protos.job_pb2 import ServerSpec
from ps import ParameterClient
from workers.device.copies import Staging, Upload
from workers.embedding.sparse import SparseEmbedding, bind_rows, tables_of, unique_keys
from workers.links.frames import Frame, FrameId
from workers.model.lookups import Lookup, Sources, embedding_at, keys_of, sources_by_table
from workers.stage.staleness import RowOrder


@dataclass(frozen=True, slots=True)
class DistinctKeys:
    """Keys of one or more micro-batches, each distinct one once."""

    keys: dict[Sources, NDArray[np.uint64]]  # [U]
    inverse: dict[Sources, list[Upload]]  # per micro-batch, positions [n]
    padded: dict[Sources, list[bool]]  # per micro-batch, whether some keys are PAD


@dataclass(frozen=True, slots=True)
class PulledRows:
    """Rows of one or more micro-batches, each distinct key once, here or on the way to a GPU."""

    of: DistinctKeys
    rows: dict[str, Upload]  # table -> [U, dim]
    learning: bool
    leaves: dict[str, Tensor] = field(default_factory=dict)  # those of `rows` that were used

    def leaf(self, table: str) -> Tensor:
        """A table's rows [U, dim] on the device; in training they collect their gradient."""
        if table not in self.leaves:
            self.leaves[table] = self.rows[table].here().requires_grad_(self.learning)
        return self.leaves[table]

    def gradients(self) -> list[Tensor]:
        """What the rows have collected."""
        return [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]


class StageRows:
    """The sparse embeddings of one stage and their tables.

    Args:
        module: the stage's module.
        lookups: of its embeddings, in the order of its forward.
        staging: to and from the stage's device.
        order: of its pulls among the commits.
        share: how many micro-batches of a step are this worker's.
        namespace: begins the tables' names on the servers.
        servers: what the job says of them.
    """

    def __init__(
        self,
        module: nn.Module,
        lookups: Sequence[Lookup],
        client: ParameterClient,
        order: RowOrder,
        share: Callable[[int], int],
        staging: Staging,
        namespace: str,
        servers: ServerSpec,
    ) -> None:
        self.layers: dict[str, SparseEmbedding] = {}
        for lookup in lookups:
            layer = embedding_at(module, lookup.embedding)
            layer.remote = True
            self.layers[lookup.embedding] = layer
        self.order = order
        self._client = client
        self._namespace = namespace
        self._share = share
        self._staging = staging
        self._arriving = ThreadPoolExecutor(1, thread_name_prefix="arriving")
        self._lock = threading.Lock()
        # Keys whose rows must not be pulled yet.
        self._waiting: dict[FrameId, Future[DistinctKeys]] = {}
        self._ahead: dict[FrameId, Future[PulledRows | None]] = {}
        self._arrived: Counter[int] = Counter()  # micro-batches of a step that have their rows
        self.tables = tables_of(self.layers.values())
        self._sources = sources_by_table(module, lookups)
        self._users = {
            table: [layer for layer in self.layers.values() if layer.spec.table == table]
            for table in self.tables
        }
        for spec in self.tables.values():
            client.create_table(
                namespace + spec.table,
                **{"memory_bytes": servers.memory_bytes, **spec.table_options()},
                durability=servers.durability or "none",
            )

    def distinct(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> DistinctKeys:
        """What some micro-batches look up: work that needs not wait until rows may be pulled."""
        found = DistinctKeys({}, {}, {})
        for sources in dict.fromkeys(self._sources.values()):
            parts = [keys_of(sources, m).numpy() for m in micro_batches]
            flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
            sizes = [len(part) for part in parts]
            found.keys[sources], positions, there = unique_keys(flat)
            each = torch.from_numpy(positions).split(sizes)
            found.inverse[sources] = [self._staging.upload(part) for part in each]
            found.padded[sources] = [False] * len(parts)
            if there is not None:
                found.padded[sources] = [not p.all() for p in torch.from_numpy(there).split(sizes)]
        return found

    def pull(self, keys: DistinctKeys, *, learning: bool) -> PulledRows | None:
        """Pull the rows of keys; None where the stage has no embeddings."""
        if not self.layers:
            return None
        pulled = self._client.pull_many(
            {self._namespace + t: keys.keys[sources] for t, sources in self._sources.items()},
            read_only=not learning,
            distinct=True,
        )
        rows = {
            table: self._staging.upload(torch.from_numpy(pulled[self._namespace + table]))
            for table in self._sources
        }
        return PulledRows(keys, rows, learning)

    def pull_ahead(self, frame: Frame) -> None:
        """Pull the rows of a micro-batch that has arrived, as soon as that may be."""
        if not self.layers:
            return
        with self._lock:
            if frame.id in self._ahead:
                return
            self._ahead[frame.id] = Future()
            self._waiting[frame.id] = self._arriving.submit(self.distinct, [frame.tensors])
        self.pull_waiting()

    def pull_waiting(self) -> None:
        """Begin the pulls that have become possible; to be called after each commit."""
        with self._lock:
            able = [frame for frame in self._waiting if self.order.may_pull(frame.step)]
            for frame in able:
                self._arriving.submit(self._pull_arrived, frame, self._waiting.pop(frame))

    def have_arrived(self, frame: FrameId) -> bool:
        """Whether the rows of an arrived micro-batch are here."""
        return not self.layers or ((f := self._ahead.get(frame)) is not None and f.done())

    def arrived(self, frame: FrameId) -> PulledRows | None:
        """Take the rows of an arrived micro-batch that are here."""
        return self._ahead.pop(frame).result() if self.layers else None

    def bind(self, pulled: PulledRows | None, index: int) -> None:
        """Give the layers their rows for the forward of the `index`-th micro-batch pulled."""
        if pulled is None:
            return
        for table, sources in self._sources.items():
            positions = pulled.of.inverse[sources][index].here()
            padded = pulled.of.padded[sources][index]
            bind_rows(self._users[table], pulled.leaf(table), positions, padded=padded)

    def collected(
        self, blocks: Sequence[PulledRows]
    ) -> Iterator[tuple[str, list[NDArray[np.uint64]], list[Tensor]]]:
        """What some rows have collected, by table: of each block keys [U], gradients [U, dim]."""
        for table, sources in self._sources.items():
            pairs = [
                (block.of.keys[sources], leaf.grad)
                for block in blocks
                if (leaf := block.leaves.get(table)) is not None and leaf.grad is not None
            ]
            if pairs:
                yield table, [keys for keys, _ in pairs], [gradient for _, gradient in pairs]

    def evict(self) -> None:
        """Have tables apply their limits, so that what is measured next is what is saved."""
        for spec in self.tables.values():
            if spec.eviction is not None:
                self._client.shrink(self._namespace + spec.table, decay=False)

    def close(self) -> None:
        """Stop pulling."""
        self._arriving.shutdown(wait=False, cancel_futures=True)

    def _pull_arrived(self, frame: FrameId, keys: Future[DistinctKeys]) -> None:
        step, future = frame.step, self._ahead[frame]
        try:
            future.set_result(self.pull(keys.result(), learning=True))
        except BaseException as error:
            future.set_exception(error)
        self._arrived[step] += 1
        if self._arrived[step] == self._share(step):
            del self._arrived[step]
            self.order.pulled(step)
        self.order.wake()
