"""When the rows of a step follow its verdict: at once, on the thread that hears it.

Rows of a later step can be pulled only after that commit, so it does not wait until the worker,
which may be in the middle of a long backward, comes to apply the step to its dense weights. Only
after a step that a cut or a validation follows does it wait: these see no later one.
"""

import threading

from protos.job_pb2 import RowSchedule
from workers.learning.optimizers import rate_factor
from workers.stage.rows.commits import RowCommits
from workers.stage.steps.verdict import Outcome, Verdict


class RowVerdicts:
    """Tells a stage's commits what becomes of each step, once and in order.

    Args:
        rates: of the rows' learning.
        steps: of the training.
    """

    def __init__(self, commits: RowCommits, rates: RowSchedule, steps: int) -> None:
        self._commits = commits
        self._rates = rates
        self._steps = steps
        self._turn = threading.Lock()
        self._next = 0  # step of which nothing has become yet
        self._applied = 0  # of the steps before, those that count
        self._held = False
        self._given_up = False

    def resume(self, step: int, applied: int) -> None:
        """Begin at a step, `applied` of those before having counted."""
        self._next, self._applied = step, applied

    def give_up(self) -> None:
        """From now on nothing becomes of rows early."""
        with self._turn:
            self._given_up = True

    def take(self, step: int, verdict: Verdict, *, last: bool, early: bool) -> None:
        """Begin to commit a step's rows, or to drop them, unless that was done or is too early.

        Args:
            last: whether something follows that is to see no later step.
            early: before this worker applies the step.
        """
        with self._turn:
            if step != self._next or verdict.outcome in (Outcome.DIVERGED, Outcome.STOP):
                return
            if early and (self._held or self._given_up):
                return
            self._next += 1
            self._held = last
            if verdict.outcome is Outcome.APPLY:
                rate = rate_factor(self._rates, self._applied, self._steps)
                self._commits.commit(step, verdict.scale, rate)
                self._applied += 1
            else:
                self._commits.discard(step)
