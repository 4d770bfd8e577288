"""Decisions that pages ask for again and again, kept for a while."""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from heterps.client.records import Job
from heterps.errors import NoDecisionError

if TYPE_CHECKING:
    from heterps.client.client import Client
    from scheduler import Decision
    from scheduler.decision.record import ParetoPoint

K = TypeVar("K")
V = TypeVar("V")
_LISTED_S = 4.0
_MOST = 64


@dataclass(slots=True)
class DecisionCache:
    """Asks the scheduler for a decision only where it may have changed; safe for many threads."""

    client: "Client"
    _listed: "dict[str, Decision]" = field(default_factory=dict)
    _listed_at: float = float("-inf")
    _asked: tuple[int, str] = (0, "")
    _ended: "OrderedDict[str, Decision]" = field(default_factory=OrderedDict)
    _curves: "OrderedDict[tuple[str, str, float], tuple[ParetoPoint, ...]]" = field(
        default_factory=OrderedDict
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def figures(self, most: int, before: str = "") -> "dict[str, Decision]":
        """Decisions of the latest `most` jobs, before one, by job, without their inputs."""
        with self._lock:
            fresh = time.monotonic() - self._listed_at < _LISTED_S
            if (most, before) == self._asked and fresh:
                return self._listed
        found = {one.job_id: one.decision for one in self.client.decisions(most, before)}
        with self._lock:
            self._listed, self._listed_at, self._asked = found, time.monotonic(), (most, before)
        return found

    def decision(self, job: Job, curve: bool = False) -> "Decision | None":
        """All of a job's decision; None where there is none.

        Args:
            curve: with the curve of cost against throughput, found now where it was not kept.
        """
        with self._lock:
            found = self._ended.get(job.job_id)
        if found is None:
            try:
                found = self.client.decision(job.job_id)
            except NoDecisionError:
                return None
            if job.state.is_final:
                with self._lock:
                    _keep(self._ended, job.job_id, found)
        return self._with_curve(job.job_id, found) if curve else found

    def _with_curve(self, job_id: str, decision: "Decision") -> "Decision":
        """The curve follows from the inputs, whatever a run comes to."""
        from heterps.page import with_curve

        key = (job_id, decision.input_hash, decision.created_at)
        with self._lock:
            curve = self._curves.get(key)
        if curve is None:
            curve = with_curve(decision).pareto
            with self._lock:
                _keep(self._curves, key, curve)
        return replace(decision, pareto=curve)


def _keep(kept: "OrderedDict[K, V]", key: K, value: V) -> None:
    kept[key] = value
    while len(kept) > _MOST:
        kept.popitem(last=False)
