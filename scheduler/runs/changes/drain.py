"""A job leaves nodes that drain, before they end.

The first of these that can be:

1. Its workers there are replaced by others on free units, where each stage has one that stays: once
   those listen they are killed, and the rest do the open step again.
2. The job goes over to workers elsewhere from a cut, under its plan.
3. It goes over to another plan, made for what is there.
4. As 1, with workers that share a unit with others of the job, until there are others for them.
5. Its workers take a cut and wait. What ran there begins elsewhere, on units that are free or
   shared, and all go on with their processes; from the cut where nobody else has the state.
6. Else the attempt ends, and the job waits in the queue until it can go on from the cut.

Where none can be, it trains on until the node ends. Nothing of this takes one of its `retries`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from protos.decision_pb2 import Decision
from protos.generations import may_be_replaced, may_regroup
from protos.job_pb2 import JobSpec
from protos.node_pb2 import SHARD, STAGE
from protos.scheduler_pb2 import END_LOST_NODE, NodeStatus
from scheduler.problem.fields import InputError
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import CallError
from scheduler.runs.change import ChangeRefusedError, PlanChange
from scheduler.runs.changes import under_way
from scheduler.runs.changes.anew import for_job, on_nodes_now, propose_now
from scheduler.runs.changes.elsewhere import go_elsewhere
from scheduler.runs.changes.move import cut_at, pause
from scheduler.runs.changes.regroup import home_now, regroup
from scheduler.runs.failures import JobError
from scheduler.runs.launch import devices_of
from scheduler.runs.offer import OfferError
from scheduler.runs.processes import Process
from scheduler.runs.sharing import Home, beside
from scheduler.state.endings import Ending
from scheduler.state.packing import Group

_AGAIN_S = 3.0  # units may become free
_CUT_S = 5.0  # that are left for a cut where going over takes too long
_log = logging.getLogger("heterps.runner")


class Drain:
    """Has an attempt that trains leave nodes; asked by the thread that follows it."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._next = 0.0  # time.monotonic() of the next try
        self._leaving: set[str] = set()  # ids of the nodes that ways are tried for
        self._left: list[Callable[[], bool]] = []  # ways that were not tried
        self._pausing = False

    def is_due(self) -> bool:
        """Whether there is something to do."""
        attempt, follower = self._attempt, self._attempt.follower
        if follower is None or follower.is_ending:
            return False
        if self._pausing:
            return follower.paused is not None
        if attempt.change is not None or follower.paused is not None:
            return False
        leaving = {node.node_id for node in self._nodes()}
        if leaving != self._leaving:  # what was done for others says nothing of these
            self._leaving, self._left, self._next = leaving, [], 0.0
        return bool(leaving) and time.monotonic() >= self._next

    def step(self) -> bool:
        """Do what is due; False where nothing was.

        Raises:
            JobError: the attempt ends, so that the job goes on elsewhere.
            Interrupted: the job is cancelled, or another scheduler has taken over.
        """
        if not self.is_due():
            return False
        if self._pausing:
            return self._end()
        if not self._left:
            self._left = [
                *(self._replace, self._go_over, self._go_over_to_another),
                *(self._share, self._pause),
            ]
        while self._left and self._attempt.change is None:
            if self._left.pop(0)():
                return True
        self._next = time.monotonic() + _AGAIN_S
        return True

    def _nodes(self) -> list[NodeStatus]:
        used = {p.node.node_id for p in self._attempt.processes if not p.standing}
        return self._attempt.context.nodes.draining(used)

    def _here(self, nodes: Sequence[NodeStatus]) -> list[Process]:
        """The job's own processes on nodes that drain."""
        ids = {node.node_id for node in nodes}
        return [p for p in self._attempt.processes if p.node.node_id in ids and not p.standing]

    def _may_regroup(self) -> bool:
        attempt = self._attempt
        return may_regroup(attempt.spec() or JobSpec(), devices_of(attempt.decision))

    def _replace(self) -> bool:
        """Replace the workers there by others elsewhere."""
        return self._replace_at(self._free)

    def _share(self) -> bool:
        """Replace the workers there by others that share units elsewhere."""
        return self._replace_at(self._shared)

    def _free(self, here: Sequence[Process]) -> list[Home] | None:
        attempt = self._attempt
        groups = [Group(worker.node.type, 1) for worker in here]
        homes = attempt.context.nodes.reserve(attempt.id.job_id, groups)
        return None if homes is None else [Home(node) for node in homes]

    def _shared(self, here: Sequence[Process]) -> list[Home] | None:
        attempt, homes = self._attempt, list[Home]()
        others = [process for process in attempt.processes if process not in here]
        for worker in here:
            usable = partial(home_now, attempt)
            node, why = beside(worker, others, attempt.decision, usable)
            if node is None:
                _log.info("job %s: %s", attempt.id.job_id, why)
                return None
            homes.append(Home(node, shared=True))
            others.append(replace(worker, node=node, shares=True))
        return homes

    def _replace_at(self, find: Callable[[Sequence[Process]], list[Home] | None]) -> bool:
        attempt, nodes = self._attempt, self._nodes()
        here = self._here(nodes)
        gone = {process.process_id for process in here}
        staying = {
            p.index for p in attempt.processes if p.role == STAGE and p.process_id not in gone
        }
        if _holds_shard(here) or len(staying) < len(attempt.decision.stages):
            return False
        if not here or not self._may_regroup():  # nobody is there: the node has ended by now
            return False
        homes = find(here)
        if homes is None:
            return False
        cause = ending_of(nodes, "its workers were replaced elsewhere")
        return go_elsewhere(attempt, here, homes, cause, nodes[0].ends_in_s)

    def _go_over(self) -> bool:
        """Go over to workers elsewhere."""
        return self._change(None)

    def _go_over_to_another(self) -> bool:
        """Go over to the best plan for what is there."""
        attempt, follower = self._attempt, self._attempt.follower
        if follower is None or _holds_shard(self._here(self._nodes())):
            return False
        spec, (measurement, _) = attempt.spec() or JobSpec(), follower.so_far()
        try:
            offered = on_nodes_now(attempt, spec)
            found = propose_now(attempt, spec, measurement, offered=offered)
        except (OfferError, InputError) as error:
            _log.info("job %s: %s", attempt.id.job_id, error)
            return False
        if found is None or not found.proposed.feasible:
            return False
        return self._change(for_job(found.proposed.to_message(), attempt.decision))

    def _change(self, decision: Decision | None) -> bool:
        nodes = self._nodes()
        if not nodes or _holds_shard(self._here(nodes)):
            return False
        until = time.monotonic() + max(0.0, nodes[0].ends_in_s - _CUT_S)
        avoid = frozenset(node.node_id for node in nodes)
        try:
            under_way.request(self._attempt, PlanChange("drained", decision, avoid, until))
        except ChangeRefusedError as error:
            _log.info("%s", error)
            return False
        return True

    def _pause(self) -> bool:
        """Have the workers take a cut and wait."""
        attempt = self._attempt
        if not self._nodes():
            return False
        try:
            pause(attempt)
        except CallError as error:
            _log.warning("job %s: %s", attempt.id.job_id, error)
            return False
        self._pausing = True
        return True

    def _end(self) -> bool:
        """The workers wait; go on from the cut without the nodes, or end the attempt.

        False where there is no cut, and who waits can go on.
        """
        attempt, follower = self._attempt, self._attempt.follower
        assert follower is not None
        self._pausing = False
        self._next = time.monotonic() + _AGAIN_S
        nodes = self._nodes()
        if not nodes or follower.paused is None:
            return False
        if cut_at(attempt, follower.paused) is None:
            if may_be_replaced(devices_of(attempt.decision)):
                return False
            raise JobError(ending_of(nodes, "no checkpoint could be taken, and nobody can go on"))
        cause = ending_of(nodes, "what runs there is to be elsewhere")
        try:
            regroup(attempt, self._here(nodes), cause)
        except JobError as error:
            if error.ending is not cause:
                raise
            why = error.besides or "there is no room elsewhere for what runs there"
            raise JobError(ending_of(nodes, why)) from None
        return True


def ending_of(nodes: Sequence[NodeStatus], text: str) -> Ending:
    """Of an attempt, or of its workers, that have to leave nodes."""
    names = ", ".join(node.node_id for node in nodes)
    text = f"node {names} drains; {text}"
    return Ending(END_LOST_NODE, text, f"node {nodes[0].node_id}", text, drained=True)


def marked(attempt: Attempt, ending: Ending) -> Ending:
    """An ending, with the word whether it is due to a node that had said that it goes."""
    kind, _, node_id = ending.process.partition(" ")
    lost = ending.reason == END_LOST_NODE and kind == "node"
    drained = lost and attempt.context.nodes.is_drained(node_id)
    return replace(ending, drained=True) if drained else ending


def _holds_shard(processes: Sequence[Process]) -> bool:
    return any(process.role == SHARD for process in processes)
