"""A step's gradients of rows on their way into the tables: workers' parts, then one commit.

Every worker of a stage stages its part with the shards, and completes its share of the step's sums
after that. The verdict follows from the sums, so that who dies once it is known takes no part away.
Then the stage's leader commits all parts together, or drops them: a row's optimizer steps once a
step on the gradient of the whole batch. A stage of one worker, whose gradient need not be known
before the verdict, sends its part with the commit.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos.reason_pb2 import PARTS_MISSING, STEP_OVER
from protos.stage_pb2 import APPLY, Notice
from ps import ParameterClient, ShardError
from ps.client.commit import Parts
from ps.engine import _native as native
from ps.table.series import LAST_STEP
from ps.table.usage import Usage
from workers.device.copies import Download, Staging
from workers.errors import RowsLostError
from workers.stage.rows.ahead import PulledRows, StageRows
from workers.stage.steps.staleness import RowOrder


@dataclass(frozen=True, slots=True)
class _Collected:
    """Gradients of one table's rows, on the way to the host."""

    table: str
    keys: list[NDArray[np.uint64]]
    gradients: Download
    usage: list[NDArray[np.float32]]


class RowCommits:
    """What becomes of one stage's gradients of rows.

    Args:
        namespace: begins the tables' names on the servers.
        series: names the stage's commits on the servers.
        rank: of this worker; 0 commits.
        width: workers of the stage.
        staleness: updates that a step lacks.
        measured: whether the norm of a step's gradient is asked for.

    Raises:
        Whatever failed in the background: from any method, afterwards.
    """

    def __init__(
        self,
        rows: StageRows,
        client: ParameterClient,
        staging: Staging,
        namespace: str,
        series: str,
        rank: int,
        width: int,
        staleness: int,
        *,
        measured: bool,
    ) -> None:
        self._staleness = staleness
        self._rows = rows
        self._order: RowOrder = rows.order
        self._client = client
        self._staging = staging
        self._namespace = namespace
        self._series = series
        self._rank = rank
        self._width = width
        self._alone = width == 1 and not measured
        self._measured = measured
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="parts")
        self._committing = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._settled = False
        self._kept: dict[int, list[_Collected]] = {}  # parts that go with their commit
        self._unstaged: set[int] = set()  # steps whose part is on its way to the shards
        self._lock = threading.Lock()
        self._begun: list[Future[None]] = []
        self._undone: dict[int, tuple[float, float] | None] = {}  # scale and rate; None: to drop

    @property
    def goes_alone(self) -> bool:
        """Whether this worker's part travels with its commit, so that nobody can take it over."""
        return self.any and self._alone

    @property
    def any(self) -> bool:
        """Whether the stage has rows at all."""
        return bool(self._rows.layers)

    def gather(self, step: int, pulled: Sequence[PulledRows]) -> None:
        """Take what the rows collected in a step; nothing, where the worker has no part of it."""
        if not self.any:
            return
        self._order.collected(step)
        collected = [
            _Collected(one.table, one.keys, self._staging.download(one.gradients), one.usage)
            for one in self._rows.collected(pulled)
        ]
        if self._alone:
            self._kept[step] = collected
        else:
            self._unstaged.add(step)
            self._do(self._sending, self._stage, step, collected)

    def is_staged(self, step: int) -> bool:
        """Whether the shards keep this worker's part of a step, or are not to."""
        return step not in self._unstaged

    def squared_norm(self, step: int) -> tuple[float, bool]:
        """At the leader, when all parts are staged: of their sum, and whether it is finite.

        0 and True where nobody asked for it to be measured.
        """
        if not self.any or not self._measured:
            return 0.0, True
        tally = self._client.tally(self._series, step, self._width)
        return tally.squared_norm, tally.finite

    def commit(self, step: int, scale: float, rate: float) -> None:
        """At every worker: a step's verdict was to apply it.

        Args:
            scale: by which gradients are multiplied.
            rate: by which learning rates are.
        """
        if self.any and self._rank == 0 and not self._settled:
            self._undone[step] = scale, rate
            self._begin(self._committing, self._commit, step, scale, rate)

    def discard(self, step: int) -> None:
        """At every worker: a step does not count."""
        if self.any and self._rank == 0 and not self._settled:
            self._undone[step] = None
            self._begin(self._committing, self._discard, step)

    def hold(self, until_freed: Callable[[], None]) -> None:
        """At every worker: commit nothing more, once all begun here is, until this returns."""
        if self._rank == 0:
            self._do(self._committing, until_freed)

    def flush(self) -> None:
        """Wait until everything begun here has been applied."""
        with self._lock:
            begun, self._begun = self._begun, []
        for future in begun:
            future.result()

    def check(self) -> None:
        """Raise what failed in the background."""
        with self._lock:
            done = [future for future in self._begun if future.done()]
            self._begun = [future for future in self._begun if future not in done]
        for future in done:
            future.result()

    def settle(self) -> None:
        """Finish, at a worker that gives up the steps under way, the commits that it alone can.

        Those of steps that are decided on later are left to who takes over.
        """
        self._settled = True
        self._committing.shutdown(wait=True, cancel_futures=True)
        if not self._alone:
            return
        for step, factors in sorted(self._undone.items()):
            if factors is not None:
                self._send_alone(step, *factors)
            else:
                self._drop(step)

    def take_over(
        self, series: Sequence[str], judged: Sequence[Notice], rates: Sequence[float], step: int
    ) -> None:
        """At the leader of another generation: finish what the one before began, and end it.

        Args:
            series: names of its commits, and of those of later generations that never trained.
            judged: verdicts on the last steps.
            rates: of learning in each of these.
            step: that this generation goes on from: nothing of it may have been committed.

        Raises:
            RowsLostError: it was, or parts of a step are gone that was to be committed.
        """
        if not self.any:
            return
        open_steps = range(step, step + self._staleness + 1)
        try:
            for notice, rate in zip(judged, rates, strict=True):
                if self._alone:
                    continue  # whoever led the stage then leads it still, and has done it
                shrink = self._rows.shrunk_after(notice.step)
                if notice.outcome == APPLY:
                    self._client.commit_async(
                        *(series[0], notice.step, self._width),
                        scale=notice.scale,
                        rate=rate,
                        shrink=shrink,
                    ).result()
                else:
                    self._client.discard_async(series[0], notice.step, shrink=shrink).result()
            for name in series:
                for later in open_steps:
                    self._client.discard_async(name, later).result()
                self._client.discard_async(name, LAST_STEP).result()
        except ShardError as error:
            if error.reason not in (PARTS_MISSING, STEP_OVER):
                raise
            raise RowsLostError(f"step {step} cannot be done again: {error}") from error

    def no_more_pulls(self) -> None:
        """Training is over: commits wait for no rows to be pulled."""
        self._order.no_more_pulls()

    def close(self) -> None:
        """Stop the threads."""
        self._sending.shutdown(wait=False, cancel_futures=True)
        self._committing.shutdown(wait=False, cancel_futures=True)

    def _do(self, pool: ThreadPoolExecutor, work: Callable[..., None], *args: object) -> None:
        self.check()
        self._begin(pool, work, *args)

    def _begin(self, pool: ThreadPoolExecutor, work: Callable[..., None], *args: object) -> None:
        future = pool.submit(work, *args)
        with self._lock:
            self._begun.append(future)
        future.add_done_callback(lambda f: self._order.wake())

    def _stage(self, step: int, collected: list[_Collected]) -> None:
        part = self._part(collected)
        self._client.stage_async(self._series, step, self._rank, part, distinct=True).result()
        self._release(collected)
        self._unstaged.remove(step)

    def _commit(self, step: int, scale: float, rate: float) -> None:
        self._order.wait_to_commit(step)
        if self._alone:
            self._send_alone(step, scale, rate)
        else:
            shrink = self._rows.shrunk_after(step)
            self._client.commit_async(
                *(self._series, step, self._width),
                scale=scale,
                rate=rate,
                shrink=shrink,
                along=self._rows.following(step),
                here=True,
            ).result()
        del self._undone[step]
        self._order.committed(step)

    def _send_alone(self, step: int, scale: float, rate: float) -> None:
        collected = self._kept[step]
        self._client.commit_async(
            self._series,
            step,
            1,
            scale=scale,
            rate=rate,
            parts=self._part(collected),
            distinct=True,
            shrink=self._rows.shrunk_after(step),
            along=self._rows.following(step),
            here=True,
        ).result()
        self._release(self._kept.pop(step))

    def _discard(self, step: int) -> None:
        self._order.wait_to_commit(step)
        if self._alone:
            self._release(self._kept.pop(step))
        self._drop(step)
        del self._undone[step]
        self._order.committed(step)

    def _drop(self, step: int) -> None:
        """Have the shards drop a step, where they are to know of it."""
        shrink = self._rows.shrunk_after(step)
        if not self._alone or shrink:
            self._client.discard_async(self._series, step, shrink=shrink).result()

    def _part(self, collected: list[_Collected]) -> Parts:
        part: dict[str, tuple[Any, ...]] = {}
        for one in collected:
            gradients = [gradient.numpy() for gradient in one.gradients.wait()]
            keys, values = one.keys[0], gradients[0]
            usage = Usage(np.concatenate(one.usage, 1) if one.usage else None)
            if len(gradients) > 1:  # rows of several micro-batches, in their order
                values = np.concatenate(gradients)
                keys, inverse = native.unique(np.concatenate(one.keys))
                values = native.segment_sum(inverse, values, len(keys), values.shape[1])
                usage = usage.merged(inverse, len(keys))
            counted = () if usage.values is None else (usage.values,)
            part[self._namespace + one.table] = keys, values, *counted
        return part

    @staticmethod
    def _release(collected: list[_Collected]) -> None:
        for one in collected:
            one.gradients.release()


def largest(pulled: Sequence[PulledRows]) -> Tensor | None:
    """Float64 []: what no row's summed gradient can be beyond; None where rows collected none.

    NaN or infinite where a gradient is. Finite gradients may sum to more than float32 holds.
    """
    blocks = [some for block in pulled if (some := [g for g in block.gradients() if g.numel()])]
    if not blocks:
        return None
    ends = [torch.stack([end for g in some for end in torch.aminmax(g)]) for some in blocks]
    return torch.stack([of_block.abs().max() for of_block in ends]).double().sum()
