"""Small messages between the workers of a job: who has what of a step, and what becomes of it.

A notice is kept where it arrives until that step is over; whoever waits for one names it. A
worker's notice to itself takes no network.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from protos.stage_pb2 import FREED, HELD, LOADED, WRITTEN, Notice, NoticeKind
from workers.links.line import NOTICE, Line

Address = tuple[int, int]  # stage and rank
_OF_CUTS = frozenset((LOADED, HELD, FREED, WRITTEN))  # may be about steps that are long over


class NoticeBoard:
    """What others have told this worker.

    Args:
        wake: called after each notice, for those who wait.

    Attributes:
        on_notice: called after each notice, before anybody is woken.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.on_notice: Callable[[], None] | None = None
        self._wake = wake
        self._lock = threading.Lock()
        self._notices: dict[tuple[NoticeKind.ValueType, int], dict[Address, Notice]] = {}

    def put(self, notice: Notice) -> None:
        """Take a notice; a repeated one changes nothing."""
        with self._lock:
            told = self._notices.setdefault((notice.kind, notice.step), {})
            told[notice.stage, notice.rank] = notice
        if self.on_notice is not None:
            self.on_notice()
        self._wake()

    def of(self, kind: NoticeKind.ValueType, step: int) -> dict[Address, Notice]:
        """Notices of a kind about a step, by sender."""
        with self._lock:
            return dict(self._notices.get((kind, step), {}))

    def has(self, kind: NoticeKind.ValueType, step: int) -> bool:
        """Whether anybody has told so."""
        return (kind, step) in self._notices

    def count(self, kind: NoticeKind.ValueType, step: int) -> int:
        """How many have told so."""
        return len(self._notices.get((kind, step), ()))

    def forget_before(self, step: int) -> None:
        """Drop the notices about steps before this one, but for those of cuts."""
        with self._lock:
            for kind, other in list(self._notices):
                if other < step and kind not in _OF_CUTS:
                    del self._notices[kind, other]

    def forget_cuts(self, step: int) -> None:
        """Drop the notices of cuts before this one."""
        with self._lock:
            for kind, other in list(self._notices):
                if other < step and kind in _OF_CUTS:
                    del self._notices[kind, other]


class Notices:
    """Tells other workers, without waiting for their answers.

    Args:
        own: stage and rank of this worker.
        stages: addresses of all workers, by stage and rank.
        board: this worker's.
        generation: of the job's workers.
        stop: as of `Line`.
    """

    def __init__(
        self,
        own: Address,
        stages: Sequence[Sequence[str]],
        board: NoticeBoard,
        generation: int = 0,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        self.board = board
        self._stop = stop
        self._generation = generation
        self._own = stage, rank = own
        self._stages = stages
        self._here = stages[stage][rank].rpartition(":")[0]
        self._lock = threading.Lock()
        self._lines: dict[Address, Line] = {}

    def tell(self, to: Address, kind: NoticeKind.ValueType, step: int, **facts: Any) -> None:
        """Tell a worker about a step.

        Raises:
            RpcError: it cannot be reached, or an earlier notice could not be delivered.
        """
        stage, rank = self._own
        notice = Notice(kind=kind, step=step, stage=stage, rank=rank, **facts)
        if to == self._own:
            self.board.put(notice)
            return
        with self._lock:
            if to not in self._lines:
                address = self._stages[to[0]][to[1]]
                label = f"stage {to[0]} worker {to[1]}"
                self._lines[to] = Line(
                    address, label, self._here, self._generation, stop=self._stop
                )
            self._lines[to].send(NOTICE, notice.SerializeToString())

    def check(self) -> None:
        """Raise what could not be delivered.

        Raises:
            RpcError: that.
        """
        for line in list(self._lines.values()):
            line.check()

    def flush(self) -> None:
        """Wait until all that was told has arrived.

        Raises:
            RpcError: something could not be delivered.
        """
        with self._lock:
            for line in self._lines.values():
                line.flush()

    def leave(self) -> None:
        """Say that nothing more comes."""
        with self._lock:
            for line in self._lines.values():
                line.leave()

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            for line in self._lines.values():
                line.close()
