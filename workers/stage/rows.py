"""Embedding rows of a stage: pulled ahead of need, their gradients pushed behind.

Staleness S bounds how many steps a pulled row may lag: the rows of step t are pulled after the
pushes of step t-1-S have been acknowledged. Where one worker reads its own batches, a push is
moreover held until the rows of S steps ahead have been pulled, so that which pushes a pull has
seen does not depend on timing and a run can be repeated exactly.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from protos.job_pb2 import ServerSpec
from ps import ParameterClient
from ps.engine import _native as native
from workers.device.copies import Download, Staging, Upload
from workers.embedding.sparse import SparseEmbedding, bind_rows, tables_of
from workers.links.frames import Frame, FrameId
from workers.model.lookups import Lookup, Sources, embedding_at, keys_of, sources_by_table
from workers.stage.staleness import StalenessBound


@dataclass(frozen=True, slots=True)
class PulledRows:
    """Rows of one or more micro-batches, each distinct key once, here or on the way to a GPU."""

    keys: dict[Sources, NDArray[np.uint64]]  # distinct keys [U]
    rows: dict[str, Upload]  # table -> [U, dim]
    inverse: dict[Sources, list[Upload]]  # per micro-batch, positions [n]
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


@dataclass(frozen=True, slots=True)
class _Push:
    """Gradients of one table's rows, on the way to the host."""

    table: str
    keys: list[NDArray[np.uint64]]
    gradients: Download


class StageRows:
    """The sparse embeddings of one stage and their tables.

    Args:
        module: the stage's module.
        lookups: of its embeddings, in the order of its forward.
        staging: to and from the stage's device.
        namespace: begins the tables' names on the servers.
        servers: what the job says of them.
    """

    def __init__(
        self,
        module: nn.Module,
        lookups: Sequence[Lookup],
        client: ParameterClient,
        bound: StalenessBound,
        staging: Staging,
        namespace: str,
        servers: ServerSpec,
    ) -> None:
        self.layers: dict[str, SparseEmbedding] = {}
        for lookup in lookups:
            layer = embedding_at(module, lookup.embedding)
            layer.remote = True
            self.layers[lookup.embedding] = layer
        self.bound = bound
        self._client = client
        self._namespace = namespace
        self._staging = staging
        self._pushing = ThreadPoolExecutor(1, thread_name_prefix="push")
        self._pulling = ThreadPoolExecutor(max(1, len(self.layers)), thread_name_prefix="pull")
        self._arriving = ThreadPoolExecutor(1, thread_name_prefix="arriving")
        self._ahead: dict[FrameId, Future[PulledRows | None]] = {}
        self._pushes: list[Future[None]] = []
        self.tables = tables_of(self.layers.values())
        self._sources = sources_by_table(module, lookups)
        self._users = {
            table: [layer for layer in self.layers.values() if layer.spec.table == table]
            for table in self.tables
        }
        for spec in self.tables.values():
            client.create_table(
                namespace + spec.table,
                **spec.table_options(),
                durability=servers.durability or "none",
                memory_bytes=servers.memory_bytes,
            )

    def pull(
        self, micro_batches: Sequence[Mapping[str, Tensor]], *, learning: bool
    ) -> PulledRows | None:
        """Pull the rows of some micro-batches' keys, each distinct key once."""
        if not self.layers:
            return None
        keys: dict[Sources, NDArray[np.uint64]] = {}
        inverse: dict[Sources, list[Upload]] = {}
        for sources in dict.fromkeys(self._sources.values()):
            parts = [keys_of(sources, m).numpy() for m in micro_batches]
            flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
            distinct, positions = native.unique(flat)
            keys[sources] = distinct
            each = torch.from_numpy(positions).split([len(p) for p in parts])
            inverse[sources] = [self._staging.upload(part) for part in each]
        waiting = {
            table: self._pulling.submit(
                self._client.pull_unique,
                self._namespace + table,
                keys[sources],
                read_only=not learning,
            )
            for table, sources in self._sources.items()
        }
        rows = {
            table: self._staging.upload(torch.from_numpy(f.result()))
            for table, f in waiting.items()
        }
        return PulledRows(keys, rows, inverse, learning)

    def pull_ahead(self, frame: Frame) -> None:
        """Begin to pull the rows of a micro-batch that has just arrived."""
        if self.layers:
            self._ahead[frame.id] = self._arriving.submit(self._pull_arrived, frame)

    def arrived(self, frame: Frame) -> PulledRows | None:
        """The rows of an arrived micro-batch: those begun by `pull_ahead`, else pulled now."""
        if not self.layers:
            return None
        future = self._ahead.pop(frame.id, None)
        return future.result() if future is not None else self._pull_arrived(frame)

    def bind(self, pulled: PulledRows | None, index: int) -> None:
        """Give the layers their rows for the forward of the `index`-th micro-batch pulled."""
        if pulled is None:
            return
        for table, sources in self._sources.items():
            positions = pulled.inverse[sources][index].here()
            bind_rows(self._users[table], pulled.leaf(table), positions)

    def push(self, step: int, pulled: Sequence[PulledRows]) -> None:
        """Push what the rows collected in `step`, in the background."""
        collected = self._collect(pulled)
        self.bound.before_push(step)
        self._pushes = [f for f in self._pushes if not _finished(f)]
        self._pushes.append(self._pushing.submit(self._push_now, step, collected))
        if self.bound.staleness == 0:
            self.flush()

    def flush(self) -> None:
        """Wait until everything pushed has been applied."""
        for future in self._pushes:
            future.result()
        self._pushes.clear()

    def close(self) -> None:
        """Stop the pulling and pushing threads."""
        self._arriving.shutdown(wait=False, cancel_futures=True)
        self._pulling.shutdown(wait=False, cancel_futures=True)
        self._pushing.shutdown(wait=False, cancel_futures=True)

    def _pull_arrived(self, frame: Frame) -> PulledRows | None:
        self.bound.before_pull(frame.id.step)
        return self.pull([frame.tensors], learning=True)

    def _collect(self, blocks: Sequence[PulledRows]) -> list[_Push]:
        """Begin to copy back what the rows collected."""
        pushes = []
        for table, sources in self._sources.items():
            pairs = [
                (block.keys[sources], leaf.grad)
                for block in blocks
                if (leaf := block.leaves.get(table)) is not None and leaf.grad is not None
            ]
            if pairs:
                keys, gradients = zip(*pairs, strict=True)
                pushes.append(_Push(table, list(keys), self._staging.download(gradients)))
        return pushes

    def _push_now(self, step: int, pushes: list[_Push]) -> None:
        waiting = []
        for push in pushes:
            grads = [gradient.numpy() for gradient in push.gradients.wait()]
            waiting.append(
                self._client.push_async(
                    self._namespace + push.table,
                    push.keys[0] if len(grads) == 1 else np.concatenate(push.keys),
                    grads[0] if len(grads) == 1 else np.concatenate(grads),
                )
            )
        for future, push in zip(waiting, pushes, strict=True):
            future.result()
            push.gradients.release()
        self.bound.acked(step)


def _finished(future: "Future[None]") -> bool:
    if not future.done():
        return False
    future.result()
    return True
