"""Steps that many workers make together: parts staged by each, one commit that applies them all."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from protos import parameter_server_pb2 as pb
from ps.client.futures import InOrder, then
from ps.client.pull_in_place import PullInPlace
from ps.client.pull_many import PullMany
from ps.client.session import Session
from ps.client.stage import Gradients, StepRequest, ToEveryShard
from ps.engine import _native
from ps.errors import NonFiniteError, TableError
from ps.table.arrays import as_gradients, as_keys, check_range
from ps.table.usage import Usage

# table -> keys, gradients; and shows and clicks, where they are counted
Parts = Mapping[str, tuple[Any, Any] | tuple[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class Tally:
    """The gradients of a step, summed over its slots, over all tables and shards.

    Attributes:
        squared_norm: the sum of their squares, in float64.
        finite: whether all of them are.
    """

    squared_norm: float
    finite: bool


class StepClient(ABC):
    """The calls by which the workers of a series make a step together.

    A step of a series changes rows once: each row that its parts name steps once, on their sum in
    the order of slots, when all are there and one of the workers commits. Parts, commits and drops
    may be repeated by anybody, over restarts of shards too; what is over stays over.
    """

    def __init__(self) -> None:
        self._ends = InOrder()
        self._tallied: dict[str, tuple[int, int]] = {}  # series -> newest step found finite, slots

    @abstractmethod
    def session(self) -> Session:
        """The connections of this process."""

    @abstractmethod
    def spec(self, table: str) -> pb.TableSpec:
        """What a table is."""

    @abstractmethod
    def wire_of(self, table: str) -> str:
        """How rows and gradients of a table travel."""

    @abstractmethod
    def _track(self, future: "Future[None]") -> "Future[None]":
        """Have `flush` wait for it."""

    def stage_async(
        self, series: str, step: int, slot: int, parts: Parts, *, distinct: bool = False
    ) -> "Future[None]":
        """Stage what one worker adds to a step; nothing changes before the commit.

        Done once every shard keeps it. Staged again it takes the place of what it was; once the
        step is over it is not kept. The arrays may be reused as soon as this returns.

        Args:
            series: names the steps of these workers. It begins with the prefix of their tables,
                and ends when that is dropped.
            step: its number; a commit ends all steps before it too.
            slot: which of the workers, from 0 on.
            parts: of each table, keys (integers of any shape) and gradients, float32
                [*keys.shape, dim]; those of equal keys sum. They need not be finite: see `tally`.
                A table with a score, or another rule that counts, takes shows and clicks as well,
                float32 [2, *keys.shape], summed over slots; without them a step counts once.
            distinct: in no table does a key come twice, which saves finding that out.

        Raises:
            TableError: wrong keys, shapes or dtypes, or no such table.
            ShardError: in the future: a shard did not answer or refused.
        """
        head = pb.StageRequest(series=series, step=step, slot=slot)
        gradients = self._gradients(parts, distinct)
        return self._track(self._to_all(head, gradients).start(lambda _: None))

    def tally(self, series: str, step: int, slots: int) -> Tally:
        """What a commit of a step would apply, before it does.

        Args:
            series, step: as of `stage_async`.
            slots: how many workers there are.

        Raises:
            ShardError: a part is lacking, or a shard did not answer.
        """
        head = pb.TallyRequest(series=series, step=step, slots=slots)
        found = self._to_all(head).start(_tally_of).result()
        if found.finite:
            self._tallied[series] = (step, slots)
        return found

    def commit_async(
        self,
        series: str,
        step: int,
        slots: int,
        *,
        scale: float = 1.0,
        rate: float = 1.0,
        parts: Parts | None = None,
        distinct: bool = False,
        shrink: Sequence[str] = (),
        along: PullMany | None = None,
        here: bool = False,
    ) -> "Future[None]":
        """Apply a step: each row of its parts steps once, on `scale` times their sum.

        Begun once the commit, or drop, of the series before it is done. That all parts are there
        and finite is asked first, unless this client has tallied the step, so that no shard has
        applied it when another refuses. A step counts as one push of each of its keys, for
        admission and eviction, and as `step` for `ttl_steps`.

        Args:
            series, step: as of `stage_async`.
            slots: parts 0 to slots - 1 are applied; without one of them, none.
            scale: of the gradients, 0 to 1e6.
            rate: times the learning rate, 0 to 1e6.
            parts: of slot 0, the only one: not staged before, it travels with the commit.
            distinct: of `parts`, see `stage_async`.
            shrink: tables whose eviction rules but `max_rows` are applied right after the step, as
                a part of it: once, on all shards, whatever dies or moves meanwhile.
            along: prepared; each shard pulls it right after the step where that can be. Run it
                afterwards in any case: it takes what has come, or else pulls.
            here: send it on this thread, as far as nothing before is to be waited for.

        Raises:
            TableError: as of `stage_async`.
            NonFiniteError: a gradient of `parts` is not finite (names its key), and nothing is
                sent. In the future: a staged one is not finite, and nothing is applied.
            ShardError: in the future: a part is lacking, the step was dropped or passed over, or a
                shard did not answer.
        """
        head = pb.CommitRequest(
            series=series, step=step, slots=slots, scale=scale, rate=rate, shrink=shrink
        )
        gradients: list[Gradients] = []
        if parts is not None:
            if slots != 1:
                raise TableError(f"slots={slots}; expected 1 for a commit that carries its part")
            head.part.slot = 0
            gradients = self._gradients(parts, distinct)
            for each in gradients:  # here, so that no shard has applied it when another refuses
                try:
                    _native.check_finite(each.keys, 8, each.values, each.dim)
                except ValueError as error:
                    raise NonFiniteError(f"table {each.table!r}: {error}") from None
        ready = along.ready if along is not None else None
        return self._end_step(head, gradients, ready, checked=parts is not None, here=here)

    def discard_async(
        self, series: str, step: int, *, shrink: Sequence[str] = (), none_after: bool = False
    ) -> "Future[None]":
        """Drop a step: its parts are forgotten, and it can no longer be committed.

        Args:
            series, step, shrink: as of `commit_async`.
            none_after: refuse where a later step was committed, though this one was dropped.

        Raises:
            ShardError: in the future: it was committed, or a shard did not answer.
        """
        head = pb.CommitRequest(
            series=series, step=step, drop=True, shrink=shrink, none_after=none_after
        )
        return self._end_step(head, [], checked=True)

    def _end_step(
        self,
        head: pb.CommitRequest,
        gradients: list[Gradients],
        along: PullInPlace | None = None,
        *,
        checked: bool,
        here: bool = False,
    ) -> "Future[None]":
        call = self._to_all(head, gradients, along)

        def finish(replies: list[bytes]) -> None:
            if along is not None:
                came = all(pb.CommitReply.FromString(reply).pulled for reply in replies)
                along.went_along(came=came)

        def begin() -> "Future[None]":
            if checked or self._tallied.get(head.series) == (head.step, head.slots):
                return call.start(finish, here=here)
            asked = pb.TallyRequest(
                series=head.series, step=head.step, slots=head.slots, committing=True
            )
            return then(self._to_all(asked).start(_tally_of), begin_if_finite)

        def begin_if_finite(found: Tally) -> "Future[None]":
            if not found.finite:
                raise NonFiniteError(
                    f"step {head.step} of {head.series!r}: gradients that are not finite; "
                    "expected it to be dropped"
                )
            return call.start(finish, here=here)

        begun = self._ends.start(head.series, begin)
        begun.add_done_callback(lambda _: call.abandon())  # what was not sent keeps no memory
        return self._track(begun)

    def _to_all(
        self,
        head: StepRequest,
        gradients: "list[Gradients] | None" = None,
        along: PullInPlace | None = None,
    ) -> ToEveryShard:
        verb = type(head).__name__.removesuffix("Request")
        what = f"{verb} of step {head.step} of {head.series!r}"
        return ToEveryShard(self.session(), head, gradients or [], what, along)

    def _gradients(self, parts: Parts, distinct: bool) -> list[Gradients]:
        made = []
        for table, (keys, grads, *counted) in parts.items():
            spec, wire = self.spec(table), self.wire_of(table)
            flat, shape = as_keys(keys)
            floats = as_gradients(grads, shape, spec.dim)
            usage = Usage(None)
            if counted:
                shows, clicks = counted[0]
                usage = Usage.of(spec, shows, clicks, shape)
            if not distinct:
                unique, inverse = _native.unique(flat)
                if len(unique) < len(flat):
                    floats = _native.segment_sum(inverse, floats, len(unique), spec.dim)
                    usage = usage.merged(inverse, len(unique))
                    flat = unique
            check_range(table, flat, floats, wire)
            made.append(Gradients(table, spec.dim, flat, floats, usage.values, wire))
        return made


def _tally_of(replies: list[bytes]) -> Tally:
    """Of the shards' replies, added in the order of shards."""
    total = sum(pb.TallyReply.FromString(reply).squared_norm for reply in replies)
    return Tally(total, math.isfinite(total))
