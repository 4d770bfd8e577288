"""Which updates the rows of step t have seen: with a staleness of S those of steps 0 to t-1-S.

The rows of step t are pulled once the commit of step t-1-S has been acknowledged, and step u is
committed once every worker of the stage has pulled its rows of step u+S and of those before. So
what a pull has seen depends on no timing, whatever the number of workers.
"""

import time
from collections import deque

from protos.stage_pb2 import COMMITTED, PULLED
from workers.links.inbox import Inbox
from workers.links.notices import Notices
from workers.links.pipeline import Place
from workers.stage.steps.schedule import Schedule

_DELAYS = 256


class RowOrder:
    """The order of pulls and commits of one stage's rows.

    Args:
        place: of this worker; rank 0 commits.
        staleness: updates that a step's rows lack.
        first: the step that training begins with; the tables have those before it.
        inbox: through which waiting threads are woken, and ended.

    Attributes:
        delays: of the latest steps, seconds from when this worker has collected a gradient to when
            it has rows that have seen it.
    """

    def __init__(
        self,
        place: Place,
        schedule: Schedule,
        staleness: int,
        first: int,
        notices: Notices,
        inbox: Inbox,
    ) -> None:
        self._place = place
        self._schedule = schedule
        self._staleness = staleness
        self._first = first
        self._notices = notices
        self._board = notices.board
        self._inbox = inbox
        self._over = False
        self._leader = (place.stage, 0)
        self._workers = [(place.stage, rank) for rank in range(place.width)]
        self._collected: dict[int, float] = {}  # when a step's gradient was
        self.delays: deque[float] = deque(maxlen=_DELAYS)

    def may_pull(self, step: int) -> bool:
        """Whether the rows of a step are those that it is to see."""
        last = self.awaited_by(step)
        return last < self._first or self._board.has(COMMITTED, last)

    def awaited_by(self, step: int) -> int:
        """The step whose commit the pull of a step waits for."""
        return step - 1 - self._staleness

    def wait_to_pull(self, step: int) -> None:
        """Wait until the rows of a step may be pulled.

        Raises:
            Stopped: told to end first.
        """
        self._inbox.wait(lambda: self.may_pull(step))

    def collected(self, step: int) -> None:
        """This worker has collected a step's gradient."""
        self._collected[step] = time.perf_counter()
        self._collected.pop(step - _DELAYS, None)

    def pulled(self, step: int) -> None:
        """This worker has all of its rows of a step."""
        begun = self._collected.pop(step - 1 - self._staleness, None)
        if begun is not None:
            self.delays.append(time.perf_counter() - begun)
        self._notices.tell(self._leader, PULLED, step)

    def wait_to_commit(self, step: int) -> None:
        """At the leader: wait until no worker has to pull rows that must not see this step.

        Steps are committed or dropped in order, each after this.
        """
        first = step + self._staleness if step > self._first else step
        for later in range(first, min(step + self._staleness + 1, self._schedule.steps)):
            self._wait_for_pulls(later)

    def _wait_for_pulls(self, step: int) -> None:
        """Wait until every worker that computes a part of a step has its rows."""
        width = self._place.width
        pulling = sum(self._schedule.computes(step, rank, width) for rank in range(width))
        self._inbox.wait(lambda: self._over or self._board.count(PULLED, step) >= pulling)

    def no_more_pulls(self) -> None:
        """Nobody is to pull rows of a step any more."""
        self._over = True
        self._inbox.wake()

    def committed(self, step: int) -> None:
        """At the leader: the tables have a step, or never will."""
        for worker in self._workers:
            self._notices.tell(worker, COMMITTED, step)

    def wake(self) -> None:
        """Have those who wait look again."""
        self._inbox.wake()
