"""Embedding rows of a stage, pulled ahead of need; in which order is `RowOrder`'s.

The first stage's rows of a step are pulled together, later stages' as each micro-batch arrives.
What they collect goes back by `workers/stage/rows/commits.py`.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from chassis.tracing import span
from protos.job_pb2 import JobSpec
from ps import ParameterClient
from ps.client.pull_many import PullMany
from workers.data.columns.labels import LABEL, click_label
from workers.data.errors import DataError
from workers.device.copies import Staging, Upload
from workers.embedding.sparse import SparseEmbedding, bind_rows, tables_of, unique_keys
from workers.embedding.spec import EmbeddingSpec
from workers.links.frames import Frame, FrameId
from workers.model.chain.lookups import Lookup, Sources, embedding_at, keys_of, sources_by_table
from workers.stage.steps.staleness import RowOrder


@dataclass(frozen=True, slots=True)
class DistinctKeys:
    """Keys of one or more micro-batches, each distinct one once."""

    keys: dict[Sources, NDArray[np.uint64]]  # [U]
    inverse: dict[Sources, list[Upload]]  # per micro-batch, positions [n]
    padded: dict[Sources, list[bool]]  # per micro-batch, whether some keys are PAD
    usage: dict[str, NDArray[np.float32]]  # table -> shows and clicks [2, U], where they count


@dataclass(frozen=True, slots=True)
class Collected:
    """What the rows of one table have collected, of one block of micro-batches after the other.

    Attributes:
        keys: [U] each.
        gradients: [U, dim] each.
        usage: shows and clicks, [2, U] each; none where they do not count.
    """

    table: str
    keys: list[NDArray[np.uint64]]
    gradients: list[Tensor]
    usage: list[NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class PulledRows:
    """Rows of one or more micro-batches, each distinct key once, here or on the way to a GPU.

    A step touches the rows of lookups that get a gradient, whichever worker they are of: a layer
    may leave some out.
    """

    of: DistinctKeys
    rows: dict[str, Upload]  # table -> [U, dim]
    learning: bool
    leaves: dict[str, Tensor] = field(default_factory=dict)  # those of `rows` that were used
    looked_up: Counter[str] = field(default_factory=Counter)  # keys, by table
    felt: dict[str, list[Tensor]] = field(default_factory=dict)  # positions [n] of those touched

    def leaf(self, table: str) -> Tensor:
        """A table's rows [U, dim] on the device; in training they collect their gradient."""
        if table not in self.leaves:
            self.leaves[table] = self.rows[table].here().requires_grad_(self.learning)
        return self.leaves[table]

    def touched(self, table: str) -> NDArray[np.bool_] | None:
        """Which rows [U] of a table are, whose leaf has a gradient; None: all."""
        felt = self.felt.get(table, [])
        if sum(map(len, felt)) == self.looked_up[table]:
            return None
        touched = np.zeros(len(self.leaves[table]), np.bool_)
        for positions in felt:
            touched[positions.cpu().numpy()] = True
        return touched

    def gradients(self) -> list[Tensor]:
        """What the rows have collected."""
        return [leaf.grad for leaf in self.leaves.values() if leaf.grad is not None]


def create_tables(
    client: ParameterClient, tables: Mapping[str, EmbeddingSpec], namespace: str, job: JobSpec
) -> None:
    """Make tables of a job's that are not there.

    Args:
        namespace: begins their names on the servers.
    """
    for spec in tables.values():
        options = {"memory_bytes": job.servers.memory_bytes, **spec.table_options()}
        if spec.wire is not None:
            options["wire"] = spec.wire
        client.create_table(
            namespace + spec.table, **options, durability=job.servers.durability or "none"
        )


class StageRows:
    """The sparse embeddings of one stage and their tables.

    Args:
        module: the stage's module.
        lookups: of its embeddings, in the order of its forward.
        staging: to and from the stage's device.
        order: of its pulls among the commits.
        share: how many micro-batches of a step are this worker's.
        namespace: begins the tables' names on the servers.
        job: whose rows they are.
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
        job: JobSpec,
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
        self._following: dict[int, PullMany] = {}  # by the step whose commit they wait for
        self._arrived: Counter[int] = Counter()  # micro-batches of a step that have their rows
        self.tables = tables_of(self.layers.values())
        self._sources = sources_by_table(module, lookups)
        self._users = {
            table: [layer for layer in self.layers.values() if layer.spec.table == table]
            for table in self.tables
        }
        self._clicks = {
            table: click_label(job, table, spec.clicks)
            for table, spec in self.tables.items()
            if spec.score is not None
        }
        self._expected: list[Future[None]] = []
        # Tables that may have rows on the disks of their servers.
        self._beyond = [
            spec.table
            for spec in self.tables.values()
            if spec.table_options().get("memory_bytes", job.servers.memory_bytes)
        ]
        create_tables(client, self.tables, namespace, job)

    def distinct(
        self, micro_batches: Sequence[Mapping[str, Tensor]], *, learning: bool
    ) -> DistinctKeys:
        """What some micro-batches look up: work that needs not wait until rows may be pulled."""
        found = DistinctKeys({}, {}, {}, {})
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
            for table, label in self._clicks.items() if learning else ():
                if self._sources[table] == sources:
                    chosen = positions if there is None else positions[there]
                    clicks = _clicks_of(table, sources, label, micro_batches)
                    if clicks is not None and there is not None:
                        clicks = clicks[there]
                    count = len(found.keys[sources])
                    found.usage[table] = usage_of(chosen, clicks, count)
        return found

    def expect(self, keys: DistinctKeys, step: int) -> None:
        """Have servers bring what of a step's keys lies on their disks into memory meanwhile.

        Which is until the rows may be pulled. A hint, and nothing else: whatever is wrong with it
        is told where they are pulled.
        """
        if self.order.may_pull(step) or not all(one.done() for one in self._expected):
            return  # or the disks are behind already
        with contextlib.suppress(RuntimeError, ValueError):
            self._expected = [
                self._client.prefetch(self._namespace + table, keys.keys[self._sources[table]])
                for table in self._beyond
            ]

    def pull(self, keys: DistinctKeys, *, learning: bool) -> PulledRows | None:
        """Pull the rows of keys; None where the stage has no embeddings."""
        if not self.layers:
            return None
        return self._pulled(keys, self._ask(keys, learning), learning)

    def pull_in_turn(self, keys: DistinctKeys, step: int) -> PulledRows:
        """Pull the rows of a step as soon as they may be: along with the commit before, if it can.

        Raises:
            Stopped: told to end first.
        """
        asked, commit = self._ask(keys, learning=True), self.order.awaited_by(step)
        if not self.order.may_pull(step):
            asked.prepare()
            self._following[commit] = asked
        try:
            self.order.wait_to_pull(step)
        except BaseException:
            asked.give_up()
            raise
        finally:
            self._following.pop(commit, None)
        with span("pull ahead", step=step):
            return self._pulled(keys, asked, learning=True)

    def following(self, step: int) -> PullMany | None:
        """Take the pull that waits for a step's commit, to go along with it."""
        return self._following.pop(step, None)

    def _ask(self, keys: DistinctKeys, learning: bool) -> PullMany:
        return self._client.ask_many(
            {self._namespace + t: keys.keys[sources] for t, sources in self._sources.items()},
            read_only=not learning,
            distinct=True,
        )

    def _pulled(self, keys: DistinctKeys, asked: PullMany, learning: bool) -> PulledRows:
        rows = {
            table: self._staging.upload(torch.from_numpy(found))
            for table, found in zip(self._sources, asked.run(), strict=True)
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
            self._waiting[frame.id] = self._arriving.submit(self._keys_of_arrived, frame)
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
            felt = None
            if pulled.learning:
                pulled.looked_up[table] += len(positions)
                felt = pulled.felt.setdefault(table, []).append
            bind_rows(self._users[table], pulled.leaf(table), positions, padded=padded, felt=felt)

    def collected(self, blocks: Sequence[PulledRows]) -> Iterator[Collected]:
        """What some rows have collected, by table."""
        for table, sources in self._sources.items():
            found = Collected(table, [], [], [])
            for block in blocks:
                leaf, usage = block.leaves.get(table), block.of.usage.get(table)
                if leaf is None or leaf.grad is None:
                    continue
                keys, gradient = block.of.keys[sources], leaf.grad
                if (touched := block.touched(table)) is not None:
                    keys, usage = keys[touched], None if usage is None else usage[:, touched]
                    gradient = gradient[torch.from_numpy(touched).to(gradient.device)]
                found.keys.append(keys)
                found.gradients.append(gradient)
                if usage is not None:
                    found.usage.append(usage)
            if found.keys:
                yield found

    def shrunk_after(self, step: int) -> list[str]:
        """The tables, as the servers call them, that a step's end is to evict rows of."""
        every = {
            table: spec.eviction.every_steps for table, spec in self.tables.items() if spec.eviction
        }
        return [
            self._namespace + t for t, steps in every.items() if steps and not (step + 1) % steps
        ]

    def evict(self) -> None:
        """Have tables apply their limits, so that what is measured next is what is saved."""
        for spec in self.tables.values():
            if spec.eviction is not None and spec.eviction.max_rows:
                self._client.shrink(self._namespace + spec.table, decay=False)

    def close(self) -> None:
        """Stop pulling."""
        self._arriving.shutdown(wait=False, cancel_futures=True)

    def _keys_of_arrived(self, frame: Frame) -> DistinctKeys:
        keys = self.distinct([frame.tensors], learning=True)
        self.expect(keys, frame.id.step)
        return keys

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


def usage_of(
    positions: NDArray[np.int64], clicks: NDArray[np.float32] | None, count: int
) -> NDArray[np.float32]:
    """How often each of `count` keys was looked up, and in clicked samples: [2, count].

    Args:
        positions: which key each look-up [n] is of.
        clicks: of their samples [n]; None: nothing was.
    """
    usage = np.zeros((2, count), np.float32)
    usage[0] = np.bincount(positions, minlength=count)
    if clicks is not None:
        usage[1] = np.bincount(positions, weights=clicks, minlength=count)
    return usage


def _clicks_of(
    table: str, sources: Sources, label: str, micro_batches: Sequence[Mapping[str, Tensor]]
) -> NDArray[np.float32] | None:
    """Whether the sample of each look-up [n] was clicked; None where no label says it."""
    if not label:
        return None
    found = []
    for tensors in micro_batches:
        clicked = tensors[LABEL + label].numpy()
        if not ((clicked >= 0) & (clicked <= 1)).all():
            wrong = clicked[~((clicked >= 0) & (clicked <= 1))][0]
            raise DataError("job", f"tables.{table}.clicks", float(wrong), "a label from 0 to 1")
        sample = {source.input: _samples(tensors[source.input]) for source in sources}
        found.append(clicked[keys_of(sources, sample).numpy()])
    return np.concatenate(found).astype(np.float32)


def _samples(keys: Tensor) -> Tensor:
    """In the place of each key the number of its sample."""
    number = torch.arange(len(keys)).reshape(-1, *[1] * (keys.ndim - 1))
    return number.expand_as(keys).contiguous()
