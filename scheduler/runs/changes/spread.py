"""Workers that share a unit get one of their own as soon as one is free.

Where none is for a minute the job goes over to a plan for what is there, if there is one that
meets its demands and is faster than the one it has with the units that it shares.
"""

import logging
import time

from protos.scheduler_pb2 import END_LOST_NODE
from scheduler.problem.fields import InputError
from scheduler.replanning.measure import Measurement
from scheduler.runs.attempt import Attempt
from scheduler.runs.change import ChangeRefusedError, PlanChange
from scheduler.runs.changes import under_way
from scheduler.runs.changes.anew import for_job, on_nodes_now, propose_now
from scheduler.runs.changes.elsewhere import go_elsewhere
from scheduler.runs.offer import OfferError
from scheduler.runs.processes import Process
from scheduler.runs.sharing import Home, pace, sharing
from scheduler.state.endings import Ending
from scheduler.state.packing import Group

_LOOK_S = 0.5
_AGAIN_S = 10.0  # after workers did not start
_PLAN_S = 60.0  # nodes may be starting again, and come back
_START_S = 60.0
_log = logging.getLogger("heterps.runner")


class Spread:
    """Has workers use units of their own again; asked by the thread that follows the attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._next = 0.0  # time.monotonic() of the next look
        self._plan_at: float | None = None  # likewise, at another plan; None: it shares nothing

    def is_due(self) -> bool:
        """Whether there is something to do."""
        attempt, follower = self._attempt, self._attempt.follower
        if follower is None or follower.is_ending or follower.paused is not None:
            return False
        if attempt.change is not None or time.monotonic() < self._next:
            return False
        found = sharing(attempt.processes)
        if not found:
            self._plan_at, attempt.lacking = None, frozenset()
            return False
        if self._plan_at is None:
            self._plan_at = time.monotonic() + _PLAN_S
        attempt.lacking = frozenset(one.node.type for one in found)
        return True

    def step(self) -> bool:
        """Do what is due; False where nothing was.

        Raises:
            JobError: the attempt ends, so that the job goes on elsewhere.
            Interrupted: the job is cancelled, or another scheduler has taken over.
        """
        if not self.is_due():
            return False
        attempt = self._attempt
        self._next = time.monotonic() + _LOOK_S
        if attempt.context.nodes.draining({p.node.node_id for p in attempt.processes}):
            return True  # they are left first
        leaving, homes = self._reserved()
        if homes:
            text = f"there are units again for {', '.join(one.label for one in leaving)}"
            cause = Ending(END_LOST_NODE, text, error=text, drained=True)
            if not go_elsewhere(attempt, leaving, homes, cause, _START_S):
                attempt.lacking = frozenset()
                self._next = time.monotonic() + _AGAIN_S
        elif self._plan_at is not None and time.monotonic() > self._plan_at:
            self._plan_at = time.monotonic() + _PLAN_S
            self._go_over()
        return True

    def _reserved(self) -> tuple[list[Process], list[Home]]:
        """Those that a unit was taken for, and where that is."""
        attempt = self._attempt
        leaving: list[Process] = []
        homes: list[Home] = []
        for worker in sharing(attempt.processes):
            group = Group(worker.node.type, 1)
            placed = attempt.context.nodes.reserve(attempt.id.job_id, [group])
            if placed is not None:
                leaving.append(worker)
                homes.append(Home(placed[0]))
        return leaving, homes

    def _go_over(self) -> None:
        """Go over to another plan, by what was predicted: what is measured is of shared units."""
        attempt, spec = self._attempt, self._attempt.spec()
        if spec is None:
            return
        try:
            offered = on_nodes_now(attempt, spec)
            found = propose_now(attempt, spec, Measurement(), offered=offered)
        except (OfferError, InputError) as error:
            _log.info("job %s: %s", attempt.id.job_id, error)
            return
        if found is None or not found.proposed.feasible:
            return
        plan = for_job(found.proposed.to_message(), attempt.decision)
        if plan.throughput <= pace(attempt.processes, attempt.decision):
            return
        try:
            under_way.request(attempt, PlanChange("shared", plan))
        except ChangeRefusedError as error:
            _log.info("%s", error)
